"""RoPE on vLLM's CPU platform: queries with a dimension for heads get the same numbers as those
without.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
plugin = pytest.importorskip("nibble.engine.plugin.cpu_rope")
pytestmark = pytest.mark.vllm
HEADS, SIZE, TOKENS = 4, 64, 7


@pytest.fixture
def rope(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's module with nibble's change, for this test."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    monkeypatch.setattr(plugin.RotaryEmbedding, "forward_cpu", plugin.RotaryEmbedding.forward_cpu)
    plugin.rotate_heads_apart()
    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    with set_current_vllm_config(VllmConfig()):
        yield get_rope(
            SIZE, 256, is_neox_style=False, rope_parameters=parameters, dtype=torch.float32
        )


def test_a_dimension_for_heads_changes_nothing(rope: Any) -> None:
    """As latent attention calls it: parts of longer rows, one key for all heads."""
    queries, latent = torch.randn(TOKENS, HEADS, 3 * SIZE), torch.randn(TOKENS, 9 * SIZE)
    q, k = queries[..., 2 * SIZE :], latent[:, None, 8 * SIZE :]
    positions = torch.arange(TOKENS)
    right_q, right_k = rope.forward_native(positions, q.clone(), k.clone())
    found_q, found_k = rope.forward_cpu(positions, q, k)
    assert torch.allclose(found_q, right_q, atol=1e-5) and torch.allclose(
        found_k, right_k, atol=1e-5
    )


def test_queries_without_it_stay_with_the_operator(
    rope: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rope, "forward_native", None)
    q, k = torch.randn(TOKENS, HEADS * SIZE), torch.randn(TOKENS, SIZE)
    found, _ = rope.forward_cpu(torch.arange(TOKENS), q, k)
    assert found.data_ptr() == q.data_ptr()
