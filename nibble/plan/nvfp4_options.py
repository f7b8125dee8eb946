"""NVFP4 options for nibble's vLLM plugin: activations, output head, kernels, scale mode. Pure.

The plugin reads them from vLLM's own `--additional-config` (engine/contract.py). Here is which
models and targets rule them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.nvfp4 import GROUP_SIZE
from nibble.engine.contract import CONFIG_FLAG as FLAG
from nibble.engine.contract import given_options
from nibble.errors import ExitCode, NibbleError
from nibble.machine.targets import Target
from nibble.plan.choice import OURS, Flags
from nibble.recipes.rules import NESTED, in_effect

REASON = "for nibble's vLLM plugin"


def asked(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the plugin will be told, by option."""
    return given_options(args.get(FLAG))


def check_is_object(args: Mapping[str, Any]) -> None:
    """Raise CONFIG where --additional-config holds no JSON object, into which nibble writes."""
    if not isinstance(given := args.get(FLAG, {}), Mapping):
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{FLAG} is {given!r}",
            expected="a JSON object",
            action=f"correct or drop {FLAG}",
        )


def check_nvfp4_options(checkpoint: Checkpoint | None, target: Target, flags: Flags) -> None:
    """Raise CONFIG for an option that this model or target rules out."""
    wanted = asked(flags.plain)
    for part in ("linear", "moe"):
        if wanted.get(f"{part}_kernel") == "nibble":
            _check_our_kernel(part, checkpoint, target, flags)
    if checkpoint is None:
        return
    is_quartet2 = checkpoint.scheme.vllm_quantization == "quartet2"
    if "act_scale_mode" in wanted and not is_quartet2:
        what = (
            f"NIBBLE_ACT_SCALE_MODE needs CloverLM, but {checkpoint.id} is {checkpoint.scheme.name}"
        )
        action = "unset NIBBLE_ACT_SCALE_MODE or drop --act-scale-mode"
        raise NibbleError(
            ExitCode.CONFIG, what=what, expected="a checkpoint of Quartet II", action=action
        )
    if wanted.get("nvfp4_activations") == "bf16" and not (
        checkpoint.scheme.is_nvfp4 or is_quartet2
    ):
        what = (
            f"NIBBLE_NVFP4_ACTIVATIONS=bf16 needs an NVFP4 checkpoint, but {checkpoint.id} is"
            f" {checkpoint.scheme.name}"
        )
        action = "unset NIBBLE_NVFP4_ACTIVATIONS or drop --nvfp4-activations"
        raise NibbleError(ExitCode.CONFIG, what=what, expected="an NVFP4 checkpoint", action=action)
    if wanted.get("quantize_lm_head") == "nvfp4" and (problem := _head_problem(checkpoint)):
        what = f"the output head of {checkpoint.id} cannot be quantized: {problem}"
        action = "unset NIBBLE_QUANTIZE_LM_HEAD or drop --quantize-lm-head"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="a separate, unquantized output head",
            action=action,
        )


def _check_our_kernel(
    part: str, checkpoint: Checkpoint | None, target: Target, flags: Flags
) -> None:
    """`part`: linear or moe."""
    option = f"NIBBLE_{part.upper()}_KERNEL"
    off, ours = f"unset {option} or drop --{part}-kernel", f"{option}=nibble"
    if target.device != "cuda":
        what = f"{ours} needs an NVIDIA GPU; on the CPU nibble's kernel runs without it"
        raise NibbleError(ExitCode.CONFIG, what=what, expected="a GPU target", action=off)
    if (backend := in_effect(f"--{part}-backend", flags.plain)) != "auto":
        kernel = flags.origin(FLAG, "nibble", f"{part}_kernel")
        what = (
            f"{ours} ({kernel.source if kernel else OURS}) and --{part}-backend {backend}"
            f" ({source_of(f'--{part}-backend', flags)}) name two kernels"
        )
        raise NibbleError(ExitCode.CONFIG, what=what, expected="one of them", action=off)
    if checkpoint is None:
        return
    scheme = checkpoint.scheme
    if not (scheme.is_nvfp4 or (part == "linear" and scheme.vllm_quantization == "quartet2")):
        what = f"{ours} needs an NVFP4 checkpoint, but {checkpoint.id} is {scheme.name}"
        raise NibbleError(ExitCode.CONFIG, what=what, expected="an NVFP4 checkpoint", action=off)
    if part == "moe" and not checkpoint.num_experts:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{ours} needs experts, but {checkpoint.id} has none",
            expected="a mixture of experts",
            action=off,
        )
    is_weight_only = (
        asked(flags.plain).get("nvfp4_activations") == "bf16" or "fp4" not in scheme.activations
    )
    if target.features.has_fp4_mma and not is_weight_only:
        what = (
            f"{ours} keeps activations in BF16, but {checkpoint.id} has them in FP4 on"
            f" {target.name}"
        )
        action = f"set NIBBLE_NVFP4_ACTIVATIONS=bf16 too, or {off}"
        raise NibbleError(ExitCode.CONFIG, what=what, expected="activations in BF16", action=action)


def with_served_activations(
    checkpoint: Checkpoint | None, args: Mapping[str, Any]
) -> Checkpoint | None:
    """The checkpoint with the activations it is served with: what is known about W4A4 kernels is
    then about W4A16.
    """
    if checkpoint is None or asked(args).get("nvfp4_activations") != "bf16":
        return checkpoint
    scheme = checkpoint.scheme
    served = dict.fromkeys(
        "bf16" if kind == "fp4" else kind for kind in scheme.activations.split("+")
    )
    return replace(checkpoint, scheme=replace(scheme, activations="+".join(served)))


def _head_problem(checkpoint: Checkpoint) -> str:
    """Why it cannot, or nothing."""
    heads = [name for name in checkpoint.tensors if name.split(".")[-2:-1] == ["lm_head"]]
    stored = next(
        (
            checkpoint.tensors[name].dtype
            for name in heads
            if name.endswith((".weight", ".weight_packed"))
        ),
        None,
    )
    if is_tied(checkpoint) or (checkpoint.tensors and stored is None):
        return (
            "it is the embedding (tie_word_embeddings)"
            if is_tied(checkpoint)
            else "the checkpoint has no separate one"
        )
    if stored is not None and stored not in ("BF16", "F16", "F32"):
        return f"it is quantized already ({stored})"
    if checkpoint.hidden_size is not None and checkpoint.hidden_size % GROUP_SIZE:
        return f"its hidden size {checkpoint.hidden_size} is not a multiple of {GROUP_SIZE}"
    return ""


def is_tied(checkpoint: Checkpoint) -> bool:
    """Whether embedding and output head are one weight, by config.json: the text model's key
    counts before the outer one.
    """
    for config in (checkpoint.text_config, checkpoint.config):
        if isinstance(found := config.get("tie_word_embeddings"), bool):
            return found
    return False


def source_of(flag: str, flags: Flags) -> str:
    """Who sets a flag, itself or as a key of a JSON-valued one."""
    outer, key = NESTED.get(flag, ("", ""))
    found = flags.get(flag) or (flags.origin(outer, key) if outer else None)
    return found.source if found is not None else OURS
