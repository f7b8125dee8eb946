"""Penalties of repeated tokens on vLLM's CPU platform, for the tokens that a request has.

vLLM 0.32 counts all tokens of the vocabulary and multiplies all logits
(model_executor/layers/utils.py:43), several times in each step. The logits are the same.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.sample.ops import penalties

from nibble.engine.plugin.require import replace

_NAMES = ("logits", "prompt_tokens_tensor", "output_tokens_tensor", "presence_penalties")


def change_few_logits() -> None:
    """Replace apply_penalties. Raises VllmMismatch."""
    if current_platform.is_cpu():
        name = "apply_penalties"  # a name in that module's namespace
        more = ("frequency_penalties", "repetition_penalties")
        replace(penalties, name, apply_penalties, *_NAMES, *more)


def apply_penalties(
    logits: Tensor,
    prompt_tokens_tensor: Tensor,
    output_tokens_tensor: Tensor,
    presence_penalties: Tensor,
    frequency_penalties: Tensor,
    repetition_penalties: Tensor,
) -> Tensor:
    """Change logits float32 [rows, vocabulary] in place.

    Tokens: int64 [rows, most of a row], filled up with the size of the vocabulary. Penalties:
    float32 [rows].
    """
    prompts, outputs = prompt_tokens_tensor.numpy(), output_tokens_tensor.numpy()
    frequencies, presences = frequency_penalties.tolist(), presence_penalties.tolist()
    for row, factor in enumerate(repetition_penalties):
        of_row = logits[row]
        if factor != 1:
            seen = _distinct(np.concatenate([prompts[row], outputs[row]]), len(of_row))[0]
            x = of_row[seen]
            of_row[seen] = x * torch.where(x > 0, 1.0 / factor, factor)
        if frequencies[row] or presences[row]:
            said, counts = _distinct(outputs[row], len(of_row))
            x = of_row[said] - frequency_penalties[row] * counts
            of_row[said] = x - presence_penalties[row]
    return logits


def _distinct(tokens: NDArray[np.int64], vocabulary: int) -> tuple[Tensor, Tensor]:
    """Tokens of the vocabulary, each once, and how often each is there."""
    found, counts = np.unique(tokens, return_counts=True)
    size = int(np.searchsorted(found, vocabulary))
    return torch.from_numpy(found[:size]), torch.from_numpy(counts[:size])
