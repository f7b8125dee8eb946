"""Weights in large pages on the CPU platform."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm")
plugin = pytest.importorskip("nibble.engine.plugin.cpu_pages")
pytestmark = pytest.mark.vllm

MIB = 1 << 20
has_large_pages = pytest.mark.skipif(
    not plugin.are_allowed(), reason="this system has no large pages"
)


@pytest.fixture
def free_large_pages() -> None:
    """Skips the test while memory is too fragmented for any."""
    with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.write(bytes(32 * MIB))
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        free = large_bytes([tensor])
        del tensor
    if free < 8 * MIB:
        pytest.skip(f"of 32 MiB, this system gave {free // MIB} MiB in large pages")


def large_bytes(tensors: list[Tensor]) -> int:
    """Of large pages in the mappings that have a part of the tensors."""
    ranges = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors]
    found, is_theirs = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            low, high = (int(word, 16) for word in mapping.groups())
            is_theirs = any(first < high and low < last for first, last in ranges)
        elif is_theirs and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) << 10
    return found


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's base loader with the plugin, whose models are one layer of 256 MiB: malloc
    gives what is smaller from memory that this process had before, which has small pages.
    """
    from vllm.model_executor.model_loader import base_loader

    owner: Any = base_loader.BaseModelLoader

    def create_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        with torch.device("meta"):
            layer = nn.Linear(2048, 32768, bias=False)
        return layer.to_empty(device="cpu")

    monkeypatch.setattr(owner, "create_model", create_model)
    name = "process_weights_after_loading"
    monkeypatch.setattr(base_loader, name, lambda model, model_config, target_device: None)
    plugin.use_large_pages()
    return base_loader


@has_large_pages
@pytest.mark.usefixtures("free_large_pages")
def test_what_is_loaded_into_large_weights_comes_into_large_pages(loader: Any) -> None:
    model = loader.BaseModelLoader.create_model(None, None, None)
    (weight,) = model.parameters()
    weight.data.fill_(1.0)
    assert large_bytes([weight]) >= 4 * MIB  # as many as the system still has


@has_large_pages
@pytest.mark.usefixtures("free_large_pages")
def test_small_weights_move_together_and_keep_their_values(loader: Any) -> None:
    weights = [torch.randn(100, 100) for _ in range(400)]  # 16 MB in the heap
    copies = [weight.clone() for weight in weights]
    model = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in weights)
    held = plugin.move(model.parameters())
    if not held:
        pytest.skip("this kernel moves nothing (before Linux 6.1)")
    assert large_bytes(weights) >= 2 * MIB
    loader.process_weights_after_loading(model, None, None)  # again
    assert all(map(torch.equal, weights, copies))


def test_a_system_whose_administrator_switched_them_off_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    allowed = tmp_path / "enabled"
    monkeypatch.setattr(plugin, "_ALLOWED", allowed)
    assert not plugin.are_allowed()  # no such file
    for text, expected in (
        ("always [madvise] never\n", True),
        ("[always] madvise never\n", True),
        ("always madvise [never]\n", False),
    ):
        allowed.write_text(text)
        assert plugin.are_allowed() is expected
    before = BaseModelLoader.create_model
    plugin.use_large_pages()
    assert BaseModelLoader.create_model is before
