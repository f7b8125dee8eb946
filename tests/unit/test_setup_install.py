"""The installer as a process and its edges: nothing here installs a runtime."""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from setup import main, pip_runner, venv
from setup.decide import SetupError
from tests.support import processor_time
from tests.support.paths import ROOT
from tests.support.releases.patch_series import CHANGES, FILES, make_series, make_tree

INSTALL = [sys.executable, str(ROOT / "setup" / "install.py")]


def finished_environment(folder: Path, *words: str) -> Path:
    """A folder that looks as a finished run with these arguments leaves it."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    wanted = main.Installation(
        main.parse(["--venv", str(folder), "--runtime", "cpu", *words])
    )._wanted()
    venv.write_stamp(folder, wanted)
    return folder


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NIBBLE_")}
    return subprocess.run(
        [*INSTALL, *words],
        env=clean | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_second_run_is_silent_and_takes_less_than_0_3_seconds(tmp_path: Path):
    folder = finished_environment(tmp_path / "venv", "--dev")
    times = []
    for _ in range(5):
        began = processor_time.of_children()
        result = run("--venv", str(folder), "--runtime", "cpu", "--dev")
        times.append(processor_time.of_children() - began)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert min(times) < 0.3


def test_a_change_of_torch_index_makes_an_installation_stale_but_keeps_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = finished_environment(tmp_path / "venv")
    stamp = venv.read_stamp(folder)
    monkeypatch.setenv("NIBBLE_TORCH_INDEX", "https://mirror.example/cpu")
    wanted = main.Installation(main.parse(["--venv", str(folder), "--runtime", "cpu"]))._wanted()
    assert wanted["runtime"] != stamp["runtime"]
    assert wanted["kind"] == stamp["kind"]


def test_another_runtime_asks_for_a_fresh_environment(tmp_path: Path):
    folder = finished_environment(tmp_path / "venv")
    wanted = main.Installation(main.parse(["--venv", str(folder), "--runtime", "cuda"]))._wanted()
    assert wanted["kind"] != venv.read_stamp(folder)["kind"]


def test_a_stamp_without_its_interpreter_is_not_trusted(tmp_path: Path):
    folder = finished_environment(tmp_path / "venv")
    (folder / "bin" / "python").unlink()
    assert venv.read_stamp(folder) == {}


def test_a_broken_stamp_is_not_trusted(tmp_path: Path):
    folder = finished_environment(tmp_path / "venv")
    (folder / venv.STAMP).write_text("{")
    assert venv.read_stamp(folder) == {}


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> main.Installation:
    """Of an environment with a small vLLM in it, finished but for a small series."""
    folder = finished_environment(tmp_path / "venv")
    make_tree(folder / "lib" / "python3.11" / "site-packages")
    monkeypatch.setattr(main, "PATCHES", make_series(tmp_path / "patches"))
    return main.Installation(main.parse(["--venv", str(folder), "--runtime", "cpu"]))


def installed(installation: main.Installation, path: str) -> Path:
    return installation.venv / "lib" / "python3.11" / "site-packages" / path


def test_a_changed_series_is_applied_without_installing_anything(
    installation: main.Installation, capsys: pytest.CaptureFixture[str]
):
    installation.run()
    said = capsys.readouterr().out
    assert said.startswith("[1/1] nibble's changes to vLLM\n      patches: 2 applied\n")
    assert "one = 'thirty'" in installed(installation, "vllm/one.py").read_text()
    assert not installation.pip.log.exists()
    installation.run()
    assert capsys.readouterr().out == ""
    make_series(main.PATCHES, {"second": CHANGES["second"]})
    (main.PATCHES / "first.patch").unlink()
    installation.run()
    assert "patches: 1 applied" in capsys.readouterr().out
    assert installed(installation, "vllm/deep/two.py").read_text() == FILES["vllm/deep/two.py"]


def test_a_series_that_cannot_be_applied_is_exit_6_and_costs_neither_vllm_nor_the_environment(
    installation: main.Installation,
):
    stamp = venv.read_stamp(installation.venv)
    installed(installation, "vllm/one.py").write_text("one = 'mine'\n")
    with pytest.raises(
        SetupError, match=r"vllm/one\.py in .*; expected sha256 .*; install vllm again"
    ) as caught:
        installation.run()
    assert caught.value.code == 6
    assert "\n" not in str(caught.value)
    assert installed(installation, "vllm/one.py").read_text() == "one = 'mine'\n"
    del stamp["patches"]
    assert venv.read_stamp(installation.venv) == stamp


def test_a_vllm_installed_again_over_a_patched_one_is_patched(installation: main.Installation):
    installation.run()
    for path in CHANGES[
        "first"
    ]:  # what pip does: its own files anew, the record of the patches stays
        installed(installation, path).write_text(FILES[path])
    venv.write_stamp(installation.venv, {**venv.read_stamp(installation.venv), "patches": ""})
    installation.run()
    assert "two = 'three'" in installed(installation, "vllm/deep/two.py").read_text()
    assert "one = 'thirty'" in installed(installation, "vllm/one.py").read_text()


def test_a_folder_that_is_no_environment_is_never_removed(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    result = run("--venv", str(tmp_path), "--runtime", "cpu")
    assert result.returncode == 5
    assert result.stderr.count("\n") == 1
    assert (tmp_path / "thesis.txt").exists()


def test_a_wheel_without_a_hash_is_one_line_and_exit_2(tmp_path: Path):
    result = run(
        "--venv",
        str(tmp_path / "v"),
        "--runtime",
        "cpu",
        NIBBLE_VLLM_CPU_WHEEL="https://example.org/vllm.whl",
    )
    assert result.returncode == 2
    assert re.fullmatch(
        r"error: NIBBLE_VLLM_CPU_WHEEL=\S+ cannot be checked; expected .*\n", result.stderr
    )
    assert not (tmp_path / "v").exists()


def test_too_little_disk_is_exit_7_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    full = types.SimpleNamespace(free=1_000_000_000)
    monkeypatch.setattr(venv.shutil, "disk_usage", lambda folder: full)
    installation = main.Installation(
        main.parse(["--venv", str(tmp_path / "v"), "--runtime", "cpu"])
    )
    with pytest.raises(SetupError, match=r"1\.0 GB are free") as caught:
        installation.run()
    assert caught.value.code == 7
    assert not (tmp_path / "v").exists()


def test_a_folder_that_is_no_environment_is_named_on_a_full_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "thesis.txt").write_text("years of work")
    monkeypatch.setattr(venv.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=0))
    with pytest.raises(SetupError, match="is not a virtual environment") as caught:
        venv.check_folder(tmp_path, 1)
    assert caught.value.code == 5


def test_a_name_server_or_host_that_never_answers_costs_no_more_than_the_limit():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        assert main.answers(f"http://127.0.0.1:{silent.getsockname()[1]}/torch/", 0.5) is False
        assert time.monotonic() - began < processor_time.with_neighbours(1.5)


@pytest.mark.parametrize(("status", "expected"), [(200, True), (403, False), (500, False)])
def test_an_index_counts_only_when_it_answers_with_success(status: int, expected: bool):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert main.answers(f"http://127.0.0.1:{server.server_port}/torch/", 3) is expected
    finally:
        server.shutdown()
        server.server_close()


def test_a_failing_pip_shows_why_in_at_most_20_lines_without_the_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pip = pip_runner.Pip(Path(sys.executable), tmp_path / "log")
    with pytest.raises(SetupError, match="pip could not install a thing") as caught:
        pip.run(["install", "--no-index", "--dry-run", "nibble-no-such-distribution"], "a thing")
    shown = capsys.readouterr().err
    assert caught.value.code == 6
    assert "No matching distribution found for nibble-no-such-distribution" in shown
    assert len(shown.splitlines()) <= pip_runner.TAIL_LINES
    assert "No matching distribution" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("line", "noise"),
    [
        (
            (
                "WARNING: Location 'file:///opt/x/simple/torch/' is ignored: it is neither a file"
                " nor a directory.\n"
            ),
            True,
        ),
        ("\n", True),
        ("WARNING: Running pip as the 'root' user can result in broken permissions\n", True),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n", False),
        ("WARNING: Retrying (Retry(total=4, connect=None))\n", False),
    ],
)
def test_only_what_a_healthy_run_prints_is_noise(line: str, noise: bool):
    assert pip_runner.is_noise(line) is noise


def test_pip_keeps_the_callers_configuration_but_not_what_leads_it_elsewhere():
    given = {
        "PIP_INDEX_URL": "https://x",
        "PIP_TARGET": "/y",
        "PYTHONPATH": "/z",
        "HTTPS_PROXY": "p",
        "PIP_USER": "1",
    }
    cleaned = pip_runner.clean_environment(given)
    assert cleaned["PIP_INDEX_URL"] == "https://x"
    assert cleaned["HTTPS_PROXY"] == "p"
    assert cleaned["PIP_USER"] == "0"
    assert cleaned.keys().isdisjoint({"PIP_TARGET", "PYTHONPATH"})


def test_the_first_file_parses_on_an_old_python_so_that_it_can_refuse():
    ast.parse((ROOT / "setup" / "install.py").read_text(), feature_version=(3, 4))
