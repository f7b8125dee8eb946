"""What the locks promise: every package pinned with hashes, and nothing in them that must come
from elsewhere.
"""

from __future__ import annotations

import re
import tomllib

import pytest

from setup import pins
from tests.support.paths import ROOT

LOCKS = ROOT / "requirements"


def entries(lock: str) -> dict[str, list[str]]:
    """Package name -> hashes, over all of its versions (they differ by Python version)."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in (LOCKS / lock).read_text().splitlines():
        if match := re.match(r"([a-z0-9][a-z0-9-]*)(?:\[[a-z,]+\])?==", line):
            name = match[1]
            found.setdefault(name, [])
        elif match := re.fullmatch(r"    --hash=sha256:([0-9a-f]{64})(?: \\)?", line):
            found[name].append(match[1])
        else:
            assert line.startswith("#"), f"{lock}: {line}"
    return found


@pytest.mark.parametrize("lock", ["cpu.lock", "cuda.lock", "dev.lock"])
def test_every_package_of_a_lock_has_hashes(lock: str):
    assert [name for name, hashes in entries(lock).items() if not hashes] == []


def test_the_cpu_lock_has_neither_torch_nor_what_breaks_beside_its_cpu_build():
    assert entries("cpu.lock").keys().isdisjoint({"torch", "vllm", *pins.NOT_BESIDE_CPU_TORCH})


def test_the_cuda_lock_has_vllm_with_the_torch_it_was_built_against():
    text = (LOCKS / "cuda.lock").read_text()
    assert f"\nvllm=={pins.VLLM_VERSION} " in text
    assert f"\ntorch=={pins.TORCH_VERSION} " in text


def test_our_own_distribution_names_are_never_resolved_from_an_index():
    ours = {"nibble", "nibble-appliance", "nibble-kernels"}
    assert all(
        entries(lock).keys().isdisjoint(ours) for lock in ("cpu.lock", "cuda.lock", "dev.lock")
    )


@pytest.mark.parametrize("lock", ["cpu.lock", "cuda.lock"])
def test_the_locks_hold_what_pyproject_asks_for_and_setuptools_to_install_it_offline(lock: str):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[^a-z0-9-]", requirement)[0] for requirement in project["dependencies"]}
    assert wanted | {"setuptools", "ray"} <= entries(lock).keys()


def test_tools_do_not_pull_a_runtime_package_to_another_version():
    pinned = {
        lock: dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\$", (LOCKS / lock).read_text(), re.M))
        for lock in ("cpu.lock", "cuda.lock", "dev.lock")
    }
    for runtime in ("cpu.lock", "cuda.lock"):
        shared = pinned["dev.lock"].keys() & pinned[runtime].keys()
        assert {name: pinned["dev.lock"][name] for name in shared} == {
            name: pinned[runtime][name] for name in shared
        }
