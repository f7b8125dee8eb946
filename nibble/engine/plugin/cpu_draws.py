"""Random tokens on vLLM's CPU platform by nibble::gumbel_argmax.

It gives the tokens of vLLM 0.32's operator (v1/sample/ops/topk_topp_sampler.py:313), which
computes an exponential for each token of the vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import nibble_kernels
import torch
from nibble_kernels.gumbel import gumbel_argmax
from torch import Tensor
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.platforms import current_platform
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from nibble.engine.plugin.require import replace, required, required_of_instances


def draw_with_few_exponentials() -> None:
    """Replace TopKTopPSampler.forward_cpu. Raises VllmMismatch."""
    if not current_platform.is_cpu() or nibble_kernels.implementations()["cpu"] != "compiled":
        return
    name = "forward_cpu"
    forward = required(TopKTopPSampler, name, "self", "logits", "generators", "k", "p")
    required_of_instances(TopKTopPSampler, "logprobs_mode", "use_fp64_gumbel")
    required(topk_topp_sampler, "apply_top_k_top_p", "logits", "k", "p")

    @functools.wraps(forward)
    def draw(
        self: Any, logits: Tensor, generators: dict[int, Any], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.use_fp64_gumbel or self.logprobs_mode in PROCESSED_LOGPROBS_MODES:
            return forward(self, logits, generators, k, p)
        logits = topk_topp_sampler.apply_top_k_top_p(logits, k, p)
        seeds = torch.randint(0, 2**31, (len(logits),))
        for row, generator in generators.items():
            seeds[row] = torch.randint(0, 2**31, (1,), generator=generator).item()
        return gumbel_argmax(logits.float().contiguous(), seeds), None

    replace(TopKTopPSampler, name, draw)
