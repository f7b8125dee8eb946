"""What the machine has, read without a CUDA context."""

from __future__ import annotations

from pathlib import Path

import pytest

from nibble import hardware
from nibble.hardware import Gpu, assume, detect, host_memory, visible
from nibble.targets import load_target

GPUS = tuple(Gpu(i, "NVIDIA H200", (9, 0), 1 << 37, 1 << 36, f"GPU-{i}abc") for i in range(4))


@pytest.mark.parametrize(
    ("selection", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-1", [1]),
        ("0,9,1", [0]),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_selects_as_cuda_does(selection: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible(GPUS, selection)] == indices


def cgroup(folder: Path, limit: str, usage: int, inactive: int) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def test_a_cgroup_limit_bounds_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup(tmp_path, str(1 << 30), 600 << 20, 100 << 20)
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    assert host_memory() == (1 << 30, (1 << 30) - (500 << 20))


def test_without_a_cgroup_limit_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup(tmp_path, "max", 600 << 20, 0)
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    total, available = host_memory()
    assert total > available > 0


def test_assumed_hardware_says_so() -> None:
    found = assume(load_target("gb10"), 2, detect({}))
    assert found.assumed and len(found.gpus) == 2 and found.cpu_arch == "aarch64"
    assert found.gpus[0].capability == (12, 1)
