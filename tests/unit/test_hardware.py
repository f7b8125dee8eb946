"""What the machine has, read without a CUDA context."""

from __future__ import annotations

import pytest

from nibble.hardware import Gpu, assume, detect, visible
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


def test_assumed_hardware_says_so() -> None:
    found = assume(load_target("gb10"), 2, detect({}))
    assert found.assumed and len(found.gpus) == 2 and found.cpu_arch == "aarch64"
    assert found.gpus[0].capability == (12, 1)
