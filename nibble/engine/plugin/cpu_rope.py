"""RoPE on vLLM's CPU platform for queries of shape [tokens, heads, head size], as in latent
attention (MLA).

vLLM 0.32's CPU operator takes heads and stride from the last two dimensions
(csrc/cpu/pos_encoding.cpp:342): it rotates each head as if it were a token, and leaves most heads
unrotated. vLLM's torch code is correct for these queries. The operator still handles queries
[tokens, width].
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from nibble.engine.plugin.require import replace, required


def rotate_heads_apart() -> None:
    """Replace RotaryEmbedding.forward_cpu (vllm 0.32 rotary_embedding/base.py:298)."""
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
