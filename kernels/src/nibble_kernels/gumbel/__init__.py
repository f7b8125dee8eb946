"""nibble::gumbel_argmax: draws a token of each row with the probabilities softmax(logits).

The token's logit plus noise of the Gumbel distribution is the row's largest. The noise is that of
vLLM 0.32's fused_gumbel_argmax: SplitMix64 of a seed and the token.
"""

from __future__ import annotations

from torch import Tensor

from nibble_kernels.gumbel import reference
from nibble_kernels.library import operator

__all__ = ["gumbel_argmax"]

_gumbel_argmax = operator(
    "gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor",
    reference.gumbel_argmax,
    lambda logits, seeds: seeds.new_empty(logits.shape[0]),
)


def gumbel_argmax(logits: Tensor, seeds: Tensor) -> Tensor:
    """Tokens int64 [rows] for logits float32 [rows, vocabulary] and seeds int64 [rows].

    A logit of -inf has no chance; a row of them has token 0. A row's token does not depend on the
    other rows. Raises RuntimeError for other dtypes or shapes.
    """
    return _gumbel_argmax(logits, seeds)
