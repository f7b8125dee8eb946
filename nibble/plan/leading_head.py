"""The copy in eight bits of a BF16 output head, with which decode steps on the CPU find the largest
logits. Pure.

The plugin makes it (engine/plugin/cpu_leading.py). What only a loaded model knows, such as other
activations, it decides; so these are upper bounds.
"""

from __future__ import annotations

from collections.abc import Mapping

from nibble.checkpoint import Checkpoint
from nibble.plan.choice import Choice, values_of
from nibble.plan.inputs import PlanInputs
from nibble.plan.nvfp4_options import UNQUANTIZED, asked, stored_head
from nibble.plan.startup import SPECULATIVE

# Those of plain_decoders.py, whose steps are operators of nibble's.
ARCHITECTURES = frozenset(
    ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
)
_MEASURES_BYTES = 12  # of a row
_RANKS = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")


def leading_head_bytes(inputs: PlanInputs, args: Mapping[str, Choice]) -> int:
    """What the copy takes; 0 without one."""
    checkpoint, values = inputs.checkpoint, values_of(args)
    if (
        inputs.target.device != "cpu"
        or inputs.without_plugin
        or checkpoint is None
        or not checkpoint.nvfp4
        or checkpoint.architecture not in ARCHITECTURES
        or not _is_bf16(checkpoint)
        or asked(values).get("quantize_lm_head") == "nvfp4"
        or values.get("--enable-lora")
        or any(values.get(flag) not in (None, False) for flag in SPECULATIVE)
        or any((values.get(flag) or 1) != 1 for flag in _RANKS)
    ):
        return 0
    return (checkpoint.vocab_size or 0) * ((checkpoint.hidden_size or 0) + _MEASURES_BYTES)


def bytes_not_read(inputs: PlanInputs, args: Mapping[str, Choice]) -> int:
    """How much less than the head a decode step reads that needs only the largest logits."""
    copy, checkpoint = leading_head_bytes(inputs, args), inputs.checkpoint
    if not copy or checkpoint is None:
        return 0
    return 2 * (checkpoint.vocab_size or 0) * (checkpoint.hidden_size or 0) - copy


def _is_bf16(checkpoint: Checkpoint) -> bool:
    return stored_head(checkpoint) in (None, *UNQUANTIZED)
