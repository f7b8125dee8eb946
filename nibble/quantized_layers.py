"""`--hf-overrides` where a checkpoint's tensors and its list of unquantized layers disagree; MTP refused where no flag can help.

vLLM 0.32 sets a dictionary in `--hf-overrides` in the place of the whole one in config.json (config/model.py:544), so the flag
carries the checkpoint's quantization config with another list. It reaches the draft of multi-token prediction too, which is
built with the target's config, but for those models whose draft reads config.json again (config/speculative.py:1084).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.exclusions import Correction, correct
from nibble.errors import ExitCode, NibbleError
from nibble.precedence import Choice, Choices
from nibble.vllm_args import merge

FLAG = "--hf-overrides"
# vllm 0.32 nemotron_h_mtp.py:239, step3p5_mtp.py:167, models/qwen4_exp/nvidia/mtp.py:135
DRAFT_READS_THE_FILE = (
    "nemotron_h",
    "nemotron_h_puzzle",
    "step3p5",
    "step3p7",
    "qwen4_exp",
    "qwen4_exp_text",
)
# With modelopt_fp4, vllm 0.32 qwen3_next_mtp.py:74 and qwen3_5_mtp.py:93 build this layer unquantized without asking.
UNQUANTIZED_DRAFT_LAYER = "mtp.fc"


def exclusion_override(checkpoint: Checkpoint | None, args: Mapping[str, Choice]) -> Choices:
    """The flag joined with the user's own, or nothing. Raises CONFIG for MTP that vLLM 0.32 could only load wrongly."""
    given = args.get(FLAG)
    if checkpoint is None or checkpoint.modules is None or (given and not _may_be_joined(given.value)):
        return {}
    with_draft = _drafts_from_itself(args)
    forced = _forced(checkpoint)
    if with_draft and forced & checkpoint.modules.quantized:
        what = f"{UNQUANTIZED_DRAFT_LAYER} of {checkpoint.id} is quantized, and vLLM 0.32 takes it as unquantized"
        raise _no_draft(what, "another checkpoint for multi-token prediction")
    found = correct(checkpoint.modules, with_draft, forced)
    if found is None:
        return {}
    wrong_draft = sorted(set(found.wrong) & checkpoint.modules.draft)
    if with_draft and wrong_draft and checkpoint.model_type in DRAFT_READS_THE_FILE:
        what = (
            f"config.json of {checkpoint.id} is wrong about the quantization of {wrong_draft[0]} in its draft"
        )
        raise _no_draft(what, "a quantization config that agrees with the tensors")
    return {FLAG: _joined(found, given)}


def _may_be_joined(value: Any) -> bool:
    """Not where the user has a quantization config of their own."""
    if not isinstance(value, Mapping):
        return False
    text = value.get("text_config")
    return "quantization_config" not in value and not (
        isinstance(text, Mapping) and "quantization_config" in text
    )


def _drafts_from_itself(args: Mapping[str, Choice]) -> bool:
    """Whether the draft is the checkpoint's own MTP layers."""
    speculative = args.get("--speculative-config")
    config = speculative.value if speculative and isinstance(speculative.value, Mapping) else {}
    return "mtp" in str(config.get("method")) and "model" not in config


def _forced(checkpoint: Checkpoint) -> frozenset[str]:
    """What vLLM 0.32 builds unquantized by the name of the model."""
    named = str(checkpoint.model_type).startswith(("qwen3_next", "qwen3_5"))
    is_nvfp4 = checkpoint.scheme.vllm_quantization == "modelopt_fp4"
    return frozenset({UNQUANTIZED_DRAFT_LAYER} if named and is_nvfp4 else ())


def _no_draft(what: str, expected: str) -> NibbleError:
    return NibbleError(ExitCode.CONFIG, what, expected, "serve it without --speculative-config")


def _joined(found: Correction, given: Choice | None) -> Choice:
    first, others = found.wrong[0], len(found.wrong) - 1
    shown = f"{first} and {others} more" if others else first
    reason = f"by its tensors, the checkpoint's list of unquantized layers is wrong about {shown}"
    ours = {"quantization_config": dict(found.config)}
    if given is None:
        return Choice(ours, "nibble's default", reason)
    return Choice(merge(ours, given.value), f"nibble's default + {given.source}", reason)
