"""The largest logit of each row on vLLM's CPU platform, by numpy.

vLLM 0.32's operator (csrc/cpu/sampling_kernels.cpp:74) finds the largest number in vectors and then
its place one number at a time. numpy's argmax is vector code. Both give the first of equal ones,
and a NaN if there is one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.sample.sampler import Sampler

from nibble.engine.plugin.require import replace


def compare_in_vectors() -> None:
    """Replace Sampler.greedy_sample. Raises VllmMismatch."""
    if current_platform.is_cpu():
        replace(Sampler, "greedy_sample", staticmethod(largest_logits), "logits")


def largest_logits(logits: Tensor) -> Tensor:
    """The places int64 [rows] of the largest numbers of float32 [rows, vocabulary]."""
    return torch.from_numpy(logits.numpy().argmax(-1))
