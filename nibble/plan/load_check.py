"""`--model-loader-extra-config`: vLLM checks a suspect checkpoint for empty weights. Pure.

vLLM 0.32 does that by default for unquantized models only. For others it serves whatever the memory
contains (model_loader/default_loader.py:507). nibble's plugin checks every model, including parts
of fused weights (whole_load.py). This flag is for a vLLM without the plugin; it compares names
only.
"""

from __future__ import annotations

from collections.abc import Mapping

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.missing import some_of
from nibble.plan.choice import OURS, Choice, Choices

FLAG, KEY = "--model-loader-extra-config", "enable_weights_track"
# Formats of vLLM's default loader; other loaders refuse the key (vllm 0.32
# model_loader/__init__.py:50).
_FORMATS = (
    *("auto", "fastsafetensors", "hf", "instanttensor"),
    *("mistral", "npcache", "pt", "safetensors"),
)


def load_check_flags(checkpoint: Checkpoint | None, args: Mapping[str, Choice]) -> Choices:
    """The flag if the checkpoint seems to lack weights; the user's keys stay."""
    if checkpoint is None or not checkpoint.missing:
        return {}
    given, load_format = args.get(FLAG), args.get("--load-format")
    if load_format is not None and load_format.value not in _FORMATS:
        return {}
    if given is not None and (not isinstance(given.value, Mapping) or KEY in given.value):
        return {}
    reason = f"the checkpoint seems to lack {some_of(checkpoint.missing)}"
    return {FLAG: Choice({KEY: True}, OURS, reason)}


def load_check_notices(
    checkpoint: Checkpoint | None, args: Mapping[str, Choice]
) -> tuple[str, ...]:
    """A notice of what seems to be missing, and whether vLLM checks it."""
    if checkpoint is None or not checkpoint.missing:
        return ()
    given = args[FLAG].value if FLAG in args else None
    is_checked = isinstance(given, Mapping) and given.get(KEY) is True
    outcome = (
        "vLLM ends the load if a weight stays empty" if is_checked else "vLLM does not check it"
    )
    return (f"{checkpoint.id} seems to lack {some_of(checkpoint.missing)}; {outcome}",)
