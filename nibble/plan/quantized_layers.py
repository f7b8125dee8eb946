"""`--hf-overrides` if vLLM needs another quantization config than the checkpoint's.

The override has a form that vLLM reads (checkpoint/vllm_config.py) and a list of layers that agrees
with the tensors (checkpoint/exclusions.py). A dictionary in `--hf-overrides` replaces the whole one
of config.json (vllm 0.32 config/model.py:544). It also applies to the draft of multi-token
prediction, which is built with the target's config. Some models' drafts read config.json again
(config/speculative.py:1084).
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
    *("nemotron_h", "nemotron_h_puzzle", "step3p5"),
    *("step3p7", "qwen4_exp", "qwen4_exp_text"),
)
# With modelopt_fp4, vLLM always builds this layer unquantized (vllm 0.32 qwen3_next_mtp.py:74,
# qwen3_5_mtp.py:93). nibble's plugin builds it as it is stored.
UNQUANTIZED_DRAFT_LAYER = "mtp.fc"


def quantization_override(checkpoint: Checkpoint | None, args: Mapping[str, Choice]) -> Choices:
    """The flag if an override is needed; the user's other keys stay.

    Raises CONFIG if vLLM 0.32 could only load the MTP draft wrongly, and for an override that is
    too long for a command line.
    """
    given = args.get(FLAG)
    if checkpoint is None or checkpoint.vllm_config is None:
        return {}
    if given and not _leaves_config_to_nibble(given.value):
        return {}
    if checkpoint.scheme.vllm_quantization == "quartet2":  # nibble's plugin reads no list of layers
        return {}
    speculative = args.get("--speculative-config")
    with_draft = drafts_from_itself(speculative.value if speculative else None)
    correction = _correction(checkpoint, with_draft)
    if (
        checkpoint.modules is not None
        and correction is None
        and is_empty_map(checkpoint.modules.config)
    ):
        what = (
            f"{checkpoint.id} is MIXED_PRECISION without a quantized layer, and its tensors do not"
            " show how they are stored"
        )
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="quantized_layers in its config",
            action="choose another export of this model",
        )
    reasons = [*checkpoint.vllm_config.reasons, *([_list_reason(correction)] if correction else ())]
    if not reasons:
        return {}
    if with_draft and checkpoint.model_type in DRAFT_READS_THE_FILE:
        _check_draft(checkpoint, correction)
    config = correction.config if correction else checkpoint.vllm_config.config
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
    # nibble's plugin (nibble.engine.plugin.mtp) builds a quantized one by the list.
    return correct(modules, with_draft, _always_unquantized(checkpoint) - modules.quantized)


def _check_draft(checkpoint: Checkpoint, correction: Correction | None) -> None:
    """Raise CONFIG if a draft that reads config.json again would miss the correction in the
    flag.
    """
    assert checkpoint.vllm_config is not None
    draft = checkpoint.modules.draft if checkpoint.modules else frozenset()
    wrong = sorted(set(correction.wrong) & draft) if correction else []
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


def _leaves_config_to_nibble(value: Any) -> bool:
    """Whether the user's --hf-overrides sets no quantization config."""
    if not isinstance(value, Mapping):
        return False
    text = value.get("text_config")
    return "quantization_config" not in value and not (
        isinstance(text, Mapping) and "quantization_config" in text
    )


def _always_unquantized(checkpoint: Checkpoint) -> frozenset[str]:
    """Layers that vLLM 0.32 builds unquantized for this model's name."""
    is_qwen = str(checkpoint.model_type).startswith(("qwen3_next", "qwen3_5"))
    is_nvfp4 = checkpoint.scheme.vllm_quantization == "modelopt_fp4"
    return frozenset({UNQUANTIZED_DRAFT_LAYER} if is_qwen and is_nvfp4 else ())


def _no_draft(what: str, expected: str) -> NibbleError:
    return NibbleError(
        ExitCode.CONFIG,
        what=what,
        expected=expected,
        action="serve it without --speculative-config",
    )


def _list_reason(correction: Correction) -> str:
    first, more = correction.wrong[0], len(correction.wrong) - 1
    shown = f"{first} and {more} more" if more else first
    return f"by its tensors, the checkpoint's list of layers is wrong about {shown}"
