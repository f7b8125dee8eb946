"""What shortens a start on the CPU platform changes no result."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
cpu_cache = pytest.importorskip("nibble.engine.plugin.cpu_cache")
cpu_mapped = pytest.importorskip("nibble.engine.plugin.cpu_mapped")
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


def test_pages_of_a_read_file_are_given_back_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM reads: each tensor is copied before the next comes. A file that was written to in
    memory keeps its pages, and memory of no file is left alone.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    size = 32 << 20
    for name in ("read", "written"):
        save_file({"a": torch.ones(size), "b": torch.ones(size)}, tmp_path / f"{name}.safetensors")
    monkeypatch.setattr(cpu_mapped, "LEAST_BYTES", 64 << 20)
    other = torch.ones(size)

    def read(self: Any, model_config: Any, model: Any) -> Any:
        for name in ("read", "written"):
            with safe_open(tmp_path / f"{name}.safetensors", "pt") as file:
                yield from ((f"{name} {key}", file.get_tensor(key)) for key in ("a", "b"))
        yield "other", other

    monkeypatch.setattr(DefaultModelLoader, "get_all_weights", read)
    cpu_mapped.give_read_pages_back()
    kept, before, largest = {}, resident_bytes(), 0
    for name, tensor in DefaultModelLoader.get_all_weights(None, None, None):  # type: ignore[arg-type]
        if name.startswith("written"):
            tensor.mul_(2)
        assert tensor.sum() == (2 if name.startswith("written") else 1) * size
        kept[name] = tensor
        if name.startswith("read"):
            largest = max(largest, resident_bytes() - before)
    assert largest < 1.2 * 4 * size  # one of its two tensors
    assert {name: tensor.sum().item() / size for name, tensor in kept.items()} == {
        "read a": 1, "read b": 1, "written a": 2, "written b": 2, "other": 1
    }  # fmt: skip
