"""The build id: equal for equal content, another for another, whenever and wherever it was
installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nibble.engine import installed as build_id
from nibble.engine.patching.apply import RECORD_FOLDER
from tests.support.paths import ROOT
from tests.support.processor_time import within
from tests.support.releases.changed_code import KERNEL, changed_nibble, changed_patches, package

ASK = """
import json
from nibble.engine.installed import build_id, build_parts, compiled_id
from tests.support.processor_time import within
print(json.dumps([build_id(), compiled_id(), dict(build_parts())]))
"""


def ids(*folders: Path) -> tuple[str, str, dict[str, str]]:
    """(build id, the caches' part, all parts) where `folders` come before what is installed."""
    path = os.pathsep.join(map(str, [*folders, ROOT]))
    environ = {
        **os.environ,
        "PYTHONPATH": path,
        "NIBBLE_ROOT": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env=environ,
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    build, compiled, parts = json.loads(done.stdout)
    return build, compiled, parts


@pytest.fixture(scope="module")
def here() -> tuple[str, str, dict[str, str]]:
    return ids()


def kernels(folder: Path, module: bytes, source: str = "1" * 64) -> Path:
    """nibble-kernels as installed from `source`, compiled to `module`."""
    installed = package("nibble_kernels")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(installed, folder / installed.name, ignore=ignored)
    (folder / installed.name / "_cpu.abi3.so").write_bytes(module)
    (folder / installed.name / "_sources.json").write_text(json.dumps({KERNEL: source}))
    return folder


def test_a_copy_elsewhere_with_other_times_and_bytecode_is_the_same_build(
    here: tuple[str, str, dict[str, str]], tmp_path: Path
) -> None:
    copy = changed_nibble(tmp_path, added="")
    for path in copy.rglob("*.py"):
        os.utime(path, (time.time() + 1000, time.time() + 1000))
    (copy / "nibble" / "__pycache__").mkdir()
    (copy / "nibble" / "__pycache__" / "drain.cpython-311.pyc").write_bytes(b"another")
    assert ids(copy) == here


def test_a_change_in_nibbles_code_is_another_build_and_keeps_the_caches(
    here: tuple[str, str, dict[str, str]], tmp_path: Path
) -> None:
    build, compiled, parts = ids(changed_nibble(tmp_path))
    assert (build != here[0], compiled) == (True, here[1])
    assert [part for part in parts if parts[part] != here[2][part]] == ["nibble"]


@pytest.mark.parametrize("file", ["plugin/dense.py", "contract/report.py"])
def test_a_change_in_the_vllm_plugin_is_another_build_with_caches_of_its_own(
    file: str, here: tuple[str, str, dict[str, str]], tmp_path: Path
) -> None:
    """It runs in vLLM's processes, whose compiled code depends on it."""
    build, compiled, parts = ids(changed_nibble(tmp_path, f"engine/{file}"))
    assert (build != here[0], compiled != here[1]) == (True, True)
    assert [part for part in parts if parts[part] != here[2][part]] == ["plugin"]


def test_times_and_probe_reports_beside_the_patches_are_no_other_build_and_another_patch_is(
    here: tuple[str, str, dict[str, str]], tmp_path: Path
) -> None:
    """`nibble patches check` leaves its report there, with the seconds that each probe took."""
    changed = changed_patches(tmp_path / "changed")
    assert ids(changed)[0] != here[0]
    record = changed / "vllm" / RECORD_FOLDER
    shutil.copy(package("vllm") / RECORD_FOLDER / "record.json", record)
    (record / "report.json").write_text(
        json.dumps({"key": "k", "lines": [{"seconds": time.time()}]})
    )
    assert ids(changed) == here


def test_another_binary_of_the_same_kernel_sources_is_the_same_build(tmp_path: Path) -> None:
    first = ids(kernels(tmp_path / "1", b"compiled here"))
    assert ids(kernels(tmp_path / "2", b"compiled there")) == first
    other = ids(kernels(tmp_path / "3", b"compiled here", "2" * 64))
    assert other[0] != first[0] and other[1] != first[1]


def test_without_their_sources_the_binaries_count(tmp_path: Path) -> None:
    found = []
    for name in ("1", "2"):
        folder = kernels(tmp_path / name, name.encode())
        (folder / "nibble_kernels" / "_sources.json").unlink()
        found.append(ids(folder)[0])
    assert found[0] != found[1]


@pytest.mark.slow  # setup.py imports torch
def test_the_kernels_wheel_says_what_it_was_made_from(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("build", "*.egg-info")
    )
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "built")]
    environ = {**os.environ, "NIBBLE_KERNELS_COMPILE": "0"}
    subprocess.run(
        command, cwd=tmp_path / "kernels", env=environ, check=True, capture_output=True, timeout=120
    )
    sources = json.loads((tmp_path / "built" / "nibble_kernels" / "_sources.json").read_text())
    assert {"setup.py", KERNEL} <= set(sources)
    assert all(len(value) == 64 for value in sources.values())
    assert not [name for name in sources if name.endswith((".py", ".md")) and name != "setup.py"]


def test_it_takes_no_longer_than_a_plan_allows() -> None:
    def compiled_id() -> str:
        build_id._part.cache_clear()
        return build_id.compiled_id()

    within(1.0, compiled_id)
