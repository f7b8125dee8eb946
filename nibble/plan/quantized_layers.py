"""`--hf-overrides` where vLLM needs another quantization config than the checkpoint's.

That is one in a form vLLM reads (checkpoint/vllm_config.py), with a list of layers that agrees with
the tensors (checkpoint/exclusions.py). vLLM 0.32 sets a dictionary in `--hf-overrides` in the place
of the whole one in config.json (config/model.py:544). It reaches the draft of multi-token
prediction too, which is built with the target's config, but for those models whose draft reads
config.json again (config/speculative.py:1084).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.exclusions import MAX_OVERRIDE_BYTES, Correction, correct, is_empty_map
from nibble.errors import ExitCode, NibbleError
from nibble.plan.choice import OURS, Choice, Choices
from nibble.plan.validate import drafts_from_itself

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
# With modelopt_fp4, vllm 0.32 qwen3_next_mtp.py:74 and qwen3_5_mtp.py:93 build this layer
# unquantized without asking; nibble's plugin, quantized where it is stored so.
UNQUANTIZED_DRAFT_LAYER = "mtp.fc"


def quantization_override(checkpoint: Checkpoint | None, args: Mapping[str, Choice]) -> Choices:
    """The flag, into which the user's own keys are merged, or nothing.

    Raises CONFIG for MTP that vLLM 0.32 could only load wrongly.
    """
    given = args.get(FLAG)
    if (
        checkpoint is None
        or checkpoint.vllm_config is None
        or (given and not _may_be_joined(given.value))
    ):
        return {}
    if checkpoint.scheme.vllm_quantization == "quartet2":  # nibble's plugin reads no list of layers
        return {}
    speculative = args.get("--speculative-config")
    with_draft = drafts_from_itself(speculative.value if speculative else None)
    found = _correction(checkpoint, with_draft)
    if checkpoint.modules is not None and found is None and is_empty_map(checkpoint.modules.config):
        what = (
            f"{checkpoint.id} is MIXED_PRECISION without a quantized layer, and its tensors do"
            f" not show"
            " how they are stored"
        )
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="quantized_layers in its config",
            action="choose another export of this model",
        )
    reasons = [*checkpoint.vllm_config.reasons, *([_list_reason(found)] if found else ())]
    if not reasons:
        return {}
    if with_draft and checkpoint.model_type in DRAFT_READS_THE_FILE:
        _check_draft(checkpoint, found)
    config = found.config if found else checkpoint.vllm_config.config
    if len(json.dumps(config)) > MAX_OVERRIDE_BYTES:
        what = (
            f"{checkpoint.id} needs another quantization config ({reasons[0]}), too long for a"
            " command line"
        )
        expected = f"at most {MAX_OVERRIDE_BYTES} bytes"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected=expected,
            action="write a shorter one to its config.json",
        )
    return {FLAG: Choice({"quantization_config": dict(config)}, OURS, "; ".join(reasons))}


def _correction(checkpoint: Checkpoint, with_draft: bool) -> Correction | None:
    modules = checkpoint.modules
    if modules is None:
        return None
    # One that is quantized is built so by nibble's plugin (nibble.engine.plugin.mtp), and
    # then by the list.
    return correct(modules, with_draft, _forced(checkpoint) - modules.quantized)


def _check_draft(checkpoint: Checkpoint, found: Correction | None) -> None:
    """Raise CONFIG where a draft that reads config.json again would read what the flag puts
    right.
    """
    assert checkpoint.vllm_config is not None
    draft = checkpoint.modules.draft if checkpoint.modules else frozenset()
    wrong = sorted(set(found.wrong) & draft) if found else []
    if wrong:
        what = (
            f"config.json of {checkpoint.id} is wrong about the quantization of {wrong[0]} in its"
            " draft"
        )
        raise _no_draft(what, "a quantization config that agrees with the tensors")
    if checkpoint.vllm_config.reasons:
        what = (
            f"the draft of {checkpoint.id} reads a config that vLLM 0.32 cannot:"
            f" {checkpoint.vllm_config.reasons[0]}"
        )
        raise _no_draft(what, "a quantization_config in config.json")


def _may_be_joined(value: Any) -> bool:
    """False where the user sets a quantization config."""
    if not isinstance(value, Mapping):
        return False
    text = value.get("text_config")
    return "quantization_config" not in value and not (
        isinstance(text, Mapping) and "quantization_config" in text
    )


def _forced(checkpoint: Checkpoint) -> frozenset[str]:
    """What vLLM 0.32 builds unquantized by the name of the model."""
    named = str(checkpoint.model_type).startswith(("qwen3_next", "qwen3_5"))
    is_nvfp4 = checkpoint.scheme.vllm_quantization == "modelopt_fp4"
    return frozenset({UNQUANTIZED_DRAFT_LAYER} if named and is_nvfp4 else ())


def _no_draft(what: str, expected: str) -> NibbleError:
    return NibbleError(
        ExitCode.CONFIG,
        what=what,
        expected=expected,
        action="serve it without --speculative-config",
    )


def _list_reason(found: Correction) -> str:
    first, others = found.wrong[0], len(found.wrong) - 1
    shown = f"{first} and {others} more" if others else first
    return f"by its tensors, the checkpoint's list of layers is wrong about {shown}"
