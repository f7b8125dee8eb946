"""What shortens a start on the CPU platform changes no result."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
cpu_cache = pytest.importorskip("nibble.engine.plugin.cpu_cache")
cpu_logprobs = pytest.importorskip("nibble.engine.plugin.cpu_logprobs")
pytestmark = pytest.mark.vllm

SIZE = cpu_cache.LEAST_BYTES + 4097


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_cache_is_zero_and_its_pages_are_taken_by_themselves() -> None:
    before = resident_bytes()
    with cpu_cache.ZerosFromTheKernel():
        memory = torch.zeros(SIZE, dtype=torch.int8, device=torch.device("cpu"))
    memory[-1] = 7  # beside the thread
    until = time.monotonic() + 30
    while resident_bytes() - before < 0.9 * SIZE and time.monotonic() < until:
        time.sleep(0.01)
    assert resident_bytes() - before >= 0.9 * SIZE
    assert memory.dtype == torch.int8 and memory.shape == (SIZE,)
    assert memory[-1] == 7 and not memory[:-1].any()


@pytest.mark.parametrize(
    "options",
    [{"dtype": torch.uint8}, {}, {"dtype": torch.int8, "device": "meta"}, {"requires_grad": False}],
)
def test_other_tensors_are_torchs(options: dict[str, Any]) -> None:
    with cpu_cache.ZerosFromTheKernel():
        found = torch.zeros(16, **options)
    assert found.shape == (16,) and found.device.type == options.get("device", "cpu")


def test_vllms_allocation_goes_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer that vLLM asks for is the one whose pages a thread takes."""
    from vllm.v1.worker import gpu_model_runner, utils

    made: list[int] = []
    monkeypatch.setattr(cpu_cache, "LEAST_BYTES", 1)
    monkeypatch.setattr(cpu_cache, "new_pages", lambda size: made.append(size) or torch.zeros(1))
    name = "allocate_kv_cache"
    monkeypatch.setattr(gpu_model_runner, name, getattr(utils, name))
    cpu_cache.take_pages_beside_the_start()
    spec = SimpleNamespace(has_layer_views=False)
    group = SimpleNamespace(layer_names=["layer"], kv_cache_spec=spec)
    tensor = SimpleNamespace(size=12345, layers=["layer"])
    config = SimpleNamespace(kv_cache_tensors=[tensor], kv_cache_groups=[group])
    allocate: Any = getattr(gpu_model_runner, name)
    allocate(config, torch.device("cpu"), None)
    assert made == [12345]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_ranks_are_those_of_vllm(rows: int) -> None:
    from vllm.v1.sample.ops import logprobs

    torch.manual_seed(rows)
    x = torch.randint(-4, 4, (rows, 500)).float().log_softmax(-1)  # with ties
    values = x.gather(1, torch.randint(0, 500, (rows, 1)))
    x[0, :3], wanted = float("-inf"), logprobs.batched_count_greater_than.__wrapped__
    assert torch.equal(cpu_logprobs.count_at_least(x, values), wanted(x, values))


def test_vllms_sampler_counts_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import logprobs

    name = "batched_count_greater_than"
    monkeypatch.setattr(sampler, name, getattr(logprobs, name))
    cpu_logprobs.count_without_compiler()
    assert getattr(sampler, name) is cpu_logprobs.count_at_least
