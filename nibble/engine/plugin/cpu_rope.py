"""RoPE on vLLM's CPU platform where queries come as [tokens, heads, head size], as latent attention
(MLA) gives them.

vLLM 0.32's CPU operator takes heads and stride from the last two dimensions
(csrc/cpu/pos_encoding.cpp:342), so that it rotates each head as if it were a token, and leaves most
of them as they were. Its plain torch code is right; queries [tokens, width] stay with the operator.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from nibble.engine.plugin.require import replace, required


def rotate_heads_apart() -> None:
    """Follow RotaryEmbedding.forward_cpu (vllm 0.32 rotary_embedding/base.py:298)."""
    names = ("self", "positions", "query", "key")
    operator = required(RotaryEmbedding, "forward_cpu", *names)
    required(RotaryEmbedding, "forward_native", *names)

    def forward_cpu(
        self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if positions.ndim == 1 and query.ndim == 3:
            return self.forward_native(positions, query, key)
        return operator(self, positions, query, key)

    replace(RotaryEmbedding, "forward_cpu", forward_cpu)
