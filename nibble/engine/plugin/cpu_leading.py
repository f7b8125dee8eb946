"""The logits that a decode step can sample, on vLLM's CPU platform.

A greedy request needs its largest logit, one with top-k its k largest ones. nibble::bf16_leading
finds them with a copy of the head in eight bits and computes them from the head itself, so that
they keep their bits. The others are -inf, which is what top-k makes of them. Where a request needs
more than that, the whole product is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import nibble_kernels
import torch
from nibble_kernels.bf16_leading import Sketch, bf16_leading, sketch_of
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample.logits_processor import builtin
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from nibble.engine.plugin import cpu_pages
from nibble.engine.plugin.cpu_decoder import operators_of
from nibble.engine.plugin.cpu_head import FEW_ROWS, head_product, is_ours
from nibble.engine.plugin.loaded_models import after_loading
from nibble.engine.plugin.plain_decoders import CAUSAL_MODELS
from nibble.engine.plugin.require import required, required_of_instances

MOST_CHOSEN = 256  # of top-k
_GREEDY = 1e-5  # a lower temperature is greedy (vllm 0.32 sampling_params.py:34)
# What else changes a request's logits: the field of each processor that says so.
_CHANGES = {
    builtin.MinPLogitsProcessor: "min_p_count",
    builtin.LogitBiasLogitsProcessor: "biases",
    builtin.MinTokensLogitsProcessor: "min_toks",
}
_NONE_OF = ("logprob_token_ids", "bad_words_token_ids")


class LeadingHead:
    """Stands for a head's product. `counts`: how many of the largest logits each row of the next
    product needs; None: all.
    """

    def __init__(self, sketch: Sketch) -> None:
        self.sketch = sketch
        self.counts: Tensor | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.counts is None or bias is not None or len(x) != len(self.counts):
            return head_product(x, weight, bias)
        return bf16_leading(x, weight[: len(self.sketch.codes)], self.sketch, self.counts)


def follow_loading() -> None:
    """Give such a head to every decoder whose steps operators compute. Raises VllmMismatch."""
    if not current_platform.is_cpu() or nibble_kernels.implementations()["cpu"] != "compiled":
        return
    required_of_instances(SamplingMetadata, "all_greedy", "temperature", "top_k", "no_penalties")
    required_of_instances(SamplingMetadata, "max_num_logprobs", "allowed_token_ids_mask")
    required_of_instances(SamplingMetadata, "logitsprocs", "thinking_budget_state_holder")
    required_of_instances(SamplingMetadata, *_NONE_OF)
    required(ThinkingBudgetStateHolder, "has_tracked_requests", "self")
    required_of_instances(SchedulerOutput, "has_structured_output_requests")
    for processor, field in _CHANGES.items():
        required_of_instances(processor, field)

    def change(model: nn.Module) -> None:
        has_drafts = get_current_vllm_config().speculative_config is not None  # vLLM's steps then
        if type(model) in CAUSAL_MODELS and operators_of(model) is not None and not has_drafts:
            sketch_head(model)

    after_loading(change)


def sketch_head(model: Any) -> None:
    """Let the head's product find the largest logits, if it is a plain one in BF16."""
    head, processor = model.lm_head, model.logits_processor
    if getattr(head, "cpu_linear", None) is not head_product or not is_ours(head.weight):
        return
    if processor.scale != 1.0 or processor.soft_cap is not None or processor.logits_as_input:
        return
    vocabulary = head.weight.detach()[: processor.org_vocab_size]  # rows of padding have no token
    codes = torch.empty(vocabulary.shape, dtype=torch.int8)
    if cpu_pages.are_allowed():
        cpu_pages.ask([codes])
    sketch = sketch_of(vocabulary, codes)
    if sketch is not None:
        head.cpu_linear = LeadingHead(sketch)


@contextlib.contextmanager
def leading_logits(model: Any, batch: Any, scheduled: Any) -> Iterator[None]:
    """Within it, the model's head computes what the requests of a decode step need."""
    head = getattr(model.lm_head, "cpu_linear", None)
    if not isinstance(head, LeadingHead):
        yield
        return
    head.counts = counts_of(batch.sampling_metadata, batch.num_reqs, scheduled)
    try:
        yield
    finally:
        head.counts = None


def counts_of(sampling: Any, rows: int, scheduled: Any) -> Tensor | None:
    """How many of the largest logits decide about each row, int64 [rows]; None if others do too."""
    if (
        rows > FEW_ROWS
        or scheduled.has_structured_output_requests
        or sampling.max_num_logprobs is not None
        or sampling.allowed_token_ids_mask is not None
        or not sampling.no_penalties
        or any(getattr(sampling, name) for name in _NONE_OF)
        or _is_thinking(sampling.thinking_budget_state_holder)
        or any(_changes(each) for each in sampling.logitsprocs.all)
    ):
        return None
    if sampling.all_greedy:
        return torch.ones(rows, dtype=torch.int64)
    if sampling.top_k is None:
        return None
    is_greedy = sampling.temperature < _GREEDY
    counts = torch.where(is_greedy, 1, sampling.top_k.long())
    return counts if int(counts.max()) <= MOST_CHOSEN else None


def _is_thinking(holder: Any) -> bool:
    return holder is not None and holder.has_tracked_requests()


def _changes(processor: Any) -> bool:
    field = _CHANGES.get(type(processor))
    return field is None or bool(getattr(processor, field))
