"""What the machine has, read without a CUDA context."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

import nibble.cli.doctor.checks
import nibble.machine.hardware
from nibble.cli.doctor.checks import diagnose
from nibble.errors import ExitCode, NibbleError
from nibble.machine.gpu_state import GpuState
from nibble.machine.hardware import Gpu, Hardware, assume, detect, visible
from nibble.machine.targets import load_target
from nibble.plan.gather import choose_target, plan_for, read_wishes

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
def test_cuda_visible_devices_selects_as_cuda_does(
    selection: str | None, indices: list[int]
) -> None:
    assert [gpu.index for gpu in visible(GPUS, selection)] == indices


@pytest.fixture
def shared_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GPUs as NVML lists them; only the third has free memory."""
    gpus = tuple(
        replace(gpu, memory_free_bytes=(1 << 36) if gpu.index == 2 else 1 << 30) for gpu in GPUS
    )
    monkeypatch.setattr(
        nibble.machine.hardware, "_nvml", lambda: (gpus, "580.159.04", "13.0", None)
    )


@pytest.mark.usefixtures("shared_host")
def test_a_plan_counts_the_chosen_gpu_and_its_memory_and_the_engine_counts_as_nibble_does() -> None:
    plan = plan_for(read_wishes(["acme/x"], {"CUDA_VISIBLE_DEVICES": "2", "HF_HUB_OFFLINE": "1"}))
    assert [gpu.index for gpu in plan.hardware.gpus] == [2] and plan.hardware.hidden_gpus == 3
    assert plan.topology.ranks_here == 1 and plan.target.name == "hopper"
    assert plan.budget.available_bytes == 1 << 36
    assert plan.env["CUDA_DEVICE_ORDER"].value == "PCI_BUS_ID"


@pytest.mark.usefixtures("shared_host")
def test_clocks_are_looked_at_on_the_chosen_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def states(indices: Iterable[int]) -> list[GpuState]:
        asked.extend(indices)
        return []

    monkeypatch.setattr(nibble.cli.doctor.checks, "gpu_states", states)
    # seconds
    monkeypatch.setattr(nibble.cli.doctor.checks, "installed_patches", lambda: (None, ()))
    diagnose({"CUDA_VISIBLE_DEVICES": "3,1", "HF_HUB_OFFLINE": "1"})
    assert asked == [3, 1]


@pytest.mark.usefixtures("shared_host")
@pytest.mark.parametrize("selection", ["7", "GPU-9", "MIG-0abc"])
def test_a_selection_that_names_no_gpu_of_this_machine_is_refused(selection: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": selection}
    asked = read_wishes([], environ)
    with pytest.raises(
        NibbleError, match=f"CUDA_VISIBLE_DEVICES={selection} leaves none of 4 GPUs"
    ) as told:
        choose_target(asked.settings, asked, detect(environ))
    assert told.value.code == ExitCode.NO_HARDWARE


@pytest.mark.usefixtures("shared_host")
@pytest.mark.parametrize("selection", ["", "-1"])
def test_a_selection_of_no_gpu_at_all_is_a_wish_for_the_cpu(selection: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": selection}
    asked = read_wishes([], environ)
    target, choice = choose_target(asked.settings, asked, detect(environ))
    assert (target.name, choice.reason) == (
        "cpu",
        f"CUDA_VISIBLE_DEVICES={selection} leaves none of 4 GPUs",
    )


def test_whose_roundings_numbers_have() -> None:
    flags = frozenset({"avx2", "avx512f"})
    here = Hardware(GPUS[:1], None, None, "x86_64", 2, flags, 0, 0)
    assert (here.arithmetic("cuda"), here.arithmetic("cpu")) == ("NVIDIA H200", "avx512f")
    assert replace(here, cpu_flags=flags | {"avx512_bf16"}).arithmetic("cpu") == "avx512_bf16"
    assert replace(here, cpu_flags=frozenset(), cpu_arch="aarch64").arithmetic("cpu") == "aarch64"


def test_assumed_hardware_says_so() -> None:
    found = assume(load_target("gb10"), 2, detect({}))
    assert found.assumed and len(found.gpus) == 2 and found.cpu_arch == "aarch64"
    assert found.gpus[0].capability == (12, 1)
