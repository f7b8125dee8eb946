"""`nibble upgrade --check` and `nibble rollback`: comparison of releases, choice of a build."""

from __future__ import annotations

import copy
import errno
import json
import os
import stat
from pathlib import Path

import pytest

from nibble.cli import rollback, upgrade
from nibble.engine.patching.series import load_series
from nibble.engine.patching.status import Line
from nibble.engine.patching.tree import open_tree
from nibble.engine.schema import Schema, load_schema
from nibble.errors import ExitCode, NibbleError

# A container engine that keeps its images in images.json beside it: tag -> (id, created, version).
ENGINE = """#!{python}
import json, pathlib, sys
file = pathlib.Path(__file__).with_name("images.json")
images = json.loads(file.read_text())
words = sys.argv[1:]
if words[0] == "images":
    for tag, (id, _, _) in images.items():
        print(f"{repository}:{{tag}} sha256:{{id}}")
    print("<none>:<none> sha256:00")
elif words[:2] == ["image", "inspect"]:
    id, created, version = images[words[2].rpartition(":")[2]]
    labels = {{"org.opencontainers.image.version": version}}
    print(json.dumps([{{"Id": id, "Created": created, "Config": {{"Labels": labels}}}}]))
elif words[0] == "tag":
    images[words[2].rpartition(":")[2]] = images[words[1].rpartition(":")[2]]
    file.write_text(json.dumps(images))
else:
    sys.exit("unknown command")
"""
OLD, NEW, OTHER = "a" * 12, "b" * 12, "c" * 12


@pytest.fixture(params=["nibble", "localhost/nibble"])
def ask(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> rollback.Ask:
    import sys

    program = tmp_path / "docker"
    program.write_text(ENGINE.format(python=sys.executable, repository=request.param))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    images = {
        "gb10": (NEW * 5, "2026-11-02T00:00:00Z", "0.2.0"),
        f"gb10-{NEW}": (NEW * 5, "2026-11-02T00:00:00Z", "0.2.0"),
        f"gb10-{OLD}": (OLD * 5, "2026-10-01T00:00:00Z", "0.1.0"),
        f"cpu-{OTHER}": (OTHER * 5, "2026-10-20T00:00:00Z", "0.1.1"),
    }
    (tmp_path / "images.json").write_text(json.dumps(images))
    monkeypatch.setenv("PATH", str(tmp_path))
    return rollback.asker(rollback.engine_of_host({}))


def test_a_rollback_gives_the_name_to_the_build_before_and_keeps_both(ask: rollback.Ask) -> None:
    found = rollback.builds("nibble", "gb10", ask)
    assert [(one.tag, one.version, one.is_current) for one in found] == [
        (f"gb10-{NEW}", "0.2.0", True),
        (f"gb10-{OLD}", "0.1.0", False),
    ]
    earlier = rollback.choose(found, "nibble", "gb10", None)
    rollback.give_name("nibble", "gb10", earlier, ask)
    found = rollback.builds("nibble", "gb10", ask)
    assert [one.is_current for one in found] == [False, True]
    with pytest.raises(NibbleError) as caught:  # there is none before that
        rollback.choose(found, "nibble", "gb10", None)
    assert caught.value.code == ExitCode.CONFIG
    assert rollback.choose(found, "nibble", "gb10", NEW).tag == f"gb10-{NEW}"  # forward again


def test_an_unknown_build_is_refused_with_those_that_are_here(ask: rollback.Ask) -> None:
    found = rollback.builds("nibble", "gb10", ask)
    with pytest.raises(NibbleError) as caught:
        rollback.choose(found, "nibble", "gb10", "gb10-123456789abc")
    assert caught.value.code == ExitCode.USAGE
    assert f"gb10-{NEW}, gb10-{OLD}" in caught.value.line()


def test_without_a_container_engine_the_error_says_where_to_run_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NibbleError) as caught:
        rollback.engine_of_host({})
    assert caught.value.code == ExitCode.CONFIG
    assert "neither docker nor podman" in caught.value.line()


def changed(**flags: object) -> Schema:
    data = copy.deepcopy(dict(load_schema().data))
    for name, default in flags.items():
        data["flags"][name.replace("_", "-")]["default"] = default
    return Schema(data)


def test_defaults_that_the_plan_leaves_to_vllm_are_named() -> None:
    newer = changed(max_num_seqs=7, seed=3)
    argv = ["model", "--max-num-seqs", "4"]
    assert [
        line.split(":")[0] for line in upgrade.changed_defaults(load_schema(), newer, argv)
    ] == ["--seed"]
    assert not list(upgrade.changed_defaults(load_schema(), load_schema(), argv))


def test_patches_whose_lines_changed_have_to_be_ported(tmp_path: Path) -> None:
    series = load_series("vllm")
    names = {patch.name for patch in series.patches if patch.paths[0].endswith(".py")}
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    (tmp_path / "vllm-0.33.0.dist-info").mkdir()
    (tmp_path / "vllm-0.33.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.33.0\n")
    assert upgrade.unfit(series, open_tree(tmp_path), names) == [
        patch.name for patch in series.patches if patch.name in names
    ]


def line(id: str, word: str, fix: str) -> Line:
    return Line(id, f"title of {id}", word, "detail", fix, "probe", 0.1)  # type: ignore[arg-type]


def test_the_report_counts_what_is_in_the_way() -> None:
    report = upgrade.Report(
        "0.32.0",
        "0.33.0",
        ("one",),
        (
            line("N1", "needed", "patch vllm/one"),
            line("N2", "fixed upstream", "patch vllm/two"),
            line("N5", "needed", "patch vllm/fits"),
        ),
        (line("N3", "failed", "rule x"), line("N4", "not fixed", "")),
        (),
        (upgrade.ModelChange("acme/a", ("no flag --x",), ("--seed: 0 -> 3",)),),
    )
    assert report.in_the_way == 3
    text = "\n".join(upgrade.report_lines(report))
    assert "vLLM 0.32.0 -> 0.33.0" in text
    assert "needed: N1, N5" in text and "fixed upstream: N2" in text
    assert "to port, since their lines changed: one" in text
    assert "N3 failed" in text and "N4" not in text
    assert "no flag --x" in text and "--seed: 0 -> 3" in text
    assert "3 finding(s) to resolve" in text and "serve on with 0.32.0" in text


def test_flashinfer_is_the_requirement_alone() -> None:
    metadata = "Name: vllm\nRequires-Dist: flashinfer-python==0.7.2.post1\nRequires-Dist: x\n"
    assert upgrade.flashinfer_of(metadata) == "flashinfer-python==0.7.2.post1"
    extra = "Requires-Dist: flashinfer-python==0.7.0; extra == 'x'\n"
    assert upgrade.flashinfer_of(extra) == "flashinfer-python==0.7.0"
    assert upgrade.flashinfer_of("Name: vllm\n") is None


_RETRY = (
    "WARNING: Retrying (Retry(total=0)) after connection broken by '{}': /simple/vllm/\n"
    "ERROR: No matching distribution found for vllm\n"
)


@pytest.mark.parametrize(
    ("printed", "why", "action"),
    [
        (
            _RETRY.format("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]"),
            "the certificate of the package index is not trusted",
            "PIP_CERT",
        ),
        (
            _RETRY.format(
                "NewConnectionError('<HTTPSConnection object at 0x7f>: Failed to establish a new"
                " connection: [Errno -3] Temporary failure in name resolution')"
            ),
            "the package index does not answer (Temporary failure in name resolution)",
            "PIP_INDEX_URL",
        ),
        (
            _RETRY.format("ReadTimeoutError(\"HTTPSConnectionPool(host='x'): Read timed out.\")"),
            "the package index does not answer (ReadTimeoutError)",
            "PIP_INDEX_URL",
        ),
        (
            "ERROR: No matching distribution found for vllm==9.9\n",
            "No matching distribution found for vllm==9.9",
            "correct --to",
        ),
    ],
)
def test_a_release_that_cannot_be_downloaded_is_told_with_the_cause(
    printed: str, why: str, action: str
) -> None:
    error = upgrade.not_downloaded("vllm", printed)
    assert error.what == f"vllm cannot be downloaded: {why}"
    assert error.code is ExitCode.VERIFY and action in error.action and "--tree" in error.action


def test_a_release_is_unpacked_in_the_cache_and_what_was_left_there_goes(tmp_path: Path) -> None:
    old, young = tmp_path / "upgrade-old", tmp_path / "upgrade-young"
    old.mkdir()
    young.mkdir()
    os.utime(old, (0, 0))
    with upgrade.scratch({"NIBBLE_CACHE_DIR": str(tmp_path)}) as folder:
        assert folder.parent == tmp_path
    assert not folder.exists() and not old.exists() and young.exists()


def test_a_full_disk_under_the_unpacked_release_is_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(NibbleError) as caught,
        upgrade.scratch({"NIBBLE_CACHE_DIR": str(tmp_path)}),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.code is ExitCode.NO_FIT and "No space left" in caught.value.line()


@pytest.mark.parametrize("version", ["new", "0.33.0; rm", "", "0"])
def test_a_release_is_checked_before_a_download(version: str) -> None:
    with pytest.raises(NibbleError) as caught:
        upgrade.check((), version, None, {})
    assert caught.value.code == ExitCode.USAGE
