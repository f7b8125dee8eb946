"""NVFP4 options for nibble's vLLM plugin: activations, output head, kernels, scale mode. Pure.

The plugin reads them from vLLM's `--additional-config` (engine/contract). This module refuses
options that a model or target rules out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.nvfp4 import GROUP_SIZE
from nibble.engine.contract import CONFIG_FLAG as FLAG
from nibble.engine.contract import CONFIG_KEY, given_options
from nibble.errors import ExitCode, NibbleError
from nibble.machine.targets import Target
from nibble.plan.choice import OURS, Choice, Choices, Flags, tensor_parallel_size, values_of
from nibble.plan.expert_shapes import has_e4m3_experts
from nibble.plan.fp4_products import columns_problem, has_our_fp4_products
from nibble.recipes.rules import NESTED, in_effect

REASON = "for nibble's vLLM plugin"
UNQUANTIZED = ("BF16", "F16", "F32")


def asked(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """The plugin's options in vLLM's flags: name -> value."""
    return given_options(args.get(FLAG))


def set_by_user(name: str, args: Mapping[str, Choice]) -> Choice | None:
    """The plugin's option `name` where the user's flags or settings have it."""
    given = asked(values_of(args)).get(name)
    return None if given is None else Choice(given, args[FLAG].source, "set by the user")


def option_flags(
    name: str, chosen: Choice | None, args: Mapping[str, Choice], value: str = "on"
) -> Choices:
    """The flag that gives the plugin's option `value` where it is chosen, unless `args` has one."""
    if chosen is None or chosen.value != value or name in asked(values_of(args)):
        return {}
    return {FLAG: Choice({CONFIG_KEY: {name: value}}, chosen.source, REASON)}


def check_is_object(args: Mapping[str, Any]) -> None:
    """Raise CONFIG if --additional-config is not a JSON object: nibble adds keys to it."""
    if not isinstance(given := args.get(FLAG, {}), Mapping):
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{FLAG} is {given!r}",
            expected="a JSON object",
            action=f"correct or drop {FLAG}",
        )


def check_nvfp4_options(checkpoint: Checkpoint | None, target: Target, flags: Flags) -> None:
    """Raise CONFIG for an option that this model or target rules out."""
    plugin_options = asked(flags.plain)
    for part in ("linear", "moe"):
        if plugin_options.get(f"{part}_kernel") == "nibble":
            _check_our_kernel(part, checkpoint, target, flags)
    if plugin_options.get("sparse_fp4") == "on":
        _check_sparse(plugin_options, checkpoint, target)
    if checkpoint is None:
        return
    is_quartet2 = checkpoint.scheme.vllm_quantization == "quartet2"
    if "act_scale_mode" in plugin_options and not is_quartet2:
        what = (
            f"NIBBLE_ACT_SCALE_MODE needs CloverLM, but {checkpoint.id} is {checkpoint.scheme.name}"
        )
        action = "unset NIBBLE_ACT_SCALE_MODE or drop --act-scale-mode"
        raise NibbleError(
            ExitCode.CONFIG, what=what, expected="a checkpoint of Quartet II", action=action
        )
    if plugin_options.get("nvfp4_activations") == "bf16" and not (
        checkpoint.scheme.is_nvfp4 or is_quartet2
    ):
        what = (
            f"NIBBLE_NVFP4_ACTIVATIONS=bf16 needs an NVFP4 checkpoint, but {checkpoint.id} is"
            f" {checkpoint.scheme.name}"
        )
        action = "unset NIBBLE_NVFP4_ACTIVATIONS or drop --nvfp4-activations"
        raise NibbleError(ExitCode.CONFIG, what=what, expected="an NVFP4 checkpoint", action=action)
    if plugin_options.get("quantize_lm_head") == "nvfp4" and (problem := _head_problem(checkpoint)):
        what = f"the output head of {checkpoint.id} cannot be quantized: {problem}"
        action = "unset NIBBLE_QUANTIZE_LM_HEAD or drop --quantize-lm-head"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="a separate, unquantized output head",
            action=action,
        )


def _check_sparse(
    plugin_options: Mapping[str, Any], checkpoint: Checkpoint | None, target: Target
) -> None:
    """Raise CONFIG if another kernel than nibble's multiplies the weights, or with activations in
    FP4.
    """
    if plugin_options.get("linear_kernel") != "nibble":
        raise NibbleError(
            ExitCode.CONFIG,
            what="NIBBLE_SPARSE_FP4=on needs nibble's linear kernel, but the plan has vLLM's",
            expected="NIBBLE_LINEAR_KERNEL=nibble on a GPU",
            action="set NIBBLE_LINEAR_KERNEL=nibble, or unset NIBBLE_SPARSE_FP4",
        )
    if checkpoint is not None and _is_in_fp4(checkpoint, target, plugin_options):
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"NIBBLE_SPARSE_FP4=on leaves activations in BF16, but {checkpoint.id} has them in"
            f" FP4 on {target.name}",
            expected="activations in BF16",
            action="set NIBBLE_NVFP4_ACTIVATIONS=bf16 too, or unset NIBBLE_SPARSE_FP4",
        )


def _is_in_fp4(checkpoint: Checkpoint, target: Target, plugin_options: Mapping[str, Any]) -> bool:
    """Whether a server would multiply activations in FP4."""
    is_weight_only = plugin_options.get("nvfp4_activations") == "bf16"
    declares = "fp4" in checkpoint.scheme.activations
    return target.features.has_fp4_mma and declares and not is_weight_only


def _check_our_kernel(
    part: str, checkpoint: Checkpoint | None, target: Target, flags: Flags
) -> None:
    """Raise CONFIG if nibble's kernel cannot run `part`, which is "linear" or "moe"."""
    option = f"NIBBLE_{part.upper()}_KERNEL"
    unset_it, option_set = f"unset {option} or drop --{part}-kernel", f"{option}=nibble"
    if target.device != "cuda":
        what = f"{option_set} needs an NVIDIA GPU; on the CPU nibble's kernel runs without it"
        raise NibbleError(ExitCode.CONFIG, what=what, expected="a GPU target", action=unset_it)
    if (backend := in_effect(f"--{part}-backend", flags.plain)) != "auto":
        kernel = flags.origin(FLAG, "nibble", f"{part}_kernel")
        what = (
            f"{option_set} ({kernel.source if kernel else OURS}) and --{part}-backend {backend}"
            f" ({source_of(f'--{part}-backend', flags)}) name two kernels"
        )
        raise NibbleError(ExitCode.CONFIG, what=what, expected="one of them", action=unset_it)
    if checkpoint is None:
        return
    scheme = checkpoint.scheme
    is_quartet2 = part == "linear" and scheme.vllm_quantization == "quartet2"
    is_e4m3 = part == "moe" and has_e4m3_experts(checkpoint)
    if not (scheme.is_nvfp4 or is_quartet2 or is_e4m3):
        expected = "an NVFP4 checkpoint" + (" or E4M3 experts" if part == "moe" else "")
        what = f"{option_set} needs {expected}, but {checkpoint.id} is {scheme.name}"
        raise NibbleError(ExitCode.CONFIG, what=what, expected=expected, action=unset_it)
    if part == "moe" and not checkpoint.num_experts:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{option_set} needs experts, but {checkpoint.id} has none",
            expected="a mixture of experts",
            action=unset_it,
        )
    if not _is_in_fp4(checkpoint, target, asked(flags.plain)):
        return
    action = f"set NIBBLE_NVFP4_ACTIVATIONS=bf16 too, or {unset_it}"
    if is_quartet2 or not has_our_fp4_products(target):
        what = (
            f"{option_set} keeps activations in BF16, but {checkpoint.id} has them in FP4 on"
            f" {target.name}"
        )
        raise NibbleError(ExitCode.CONFIG, what=what, expected="activations in BF16", action=action)
    split = tensor_parallel_size(flags.plain)
    if part == "linear" and checkpoint.weights and (problem := columns_problem(checkpoint, split)):
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{option_set} cannot serve {checkpoint.id} with FP4 activations: {problem}",
            expected="other columns on a GPU, or activations in BF16",
            action=action,
        )


def with_served_activations(
    checkpoint: Checkpoint | None, args: Mapping[str, Any]
) -> Checkpoint | None:
    """The checkpoint with the activations that the server uses. Rules about W4A4 kernels then
    become rules about W4A16.
    """
    if checkpoint is None or asked(args).get("nvfp4_activations") != "bf16":
        return checkpoint
    scheme = checkpoint.scheme
    served = dict.fromkeys(
        "bf16" if kind == "fp4" else kind for kind in scheme.activations.split("+")
    )
    return replace(checkpoint, scheme=replace(scheme, activations="+".join(served)))


def _head_problem(checkpoint: Checkpoint) -> str:
    """Why the output head cannot be quantized; empty if it can."""
    stored = stored_head(checkpoint)
    if is_tied(checkpoint):
        return "it is the embedding (tie_word_embeddings)"
    if checkpoint.tensors and stored is None:
        return "the checkpoint has no separate one"
    if stored is not None and stored not in UNQUANTIZED:
        return f"it is quantized already ({stored})"
    if checkpoint.hidden_size is not None and checkpoint.hidden_size % GROUP_SIZE:
        return f"its hidden size {checkpoint.hidden_size} is not a multiple of {GROUP_SIZE}"
    return ""


def stored_head(checkpoint: Checkpoint) -> str | None:
    """The dtype of the separate output head in the files; None without one."""
    heads = (name for name in checkpoint.tensors if name.split(".")[-2:-1] == ["lm_head"])
    weights = (name for name in heads if name.endswith((".weight", ".weight_packed")))
    return next((checkpoint.tensors[name].dtype for name in weights), None)


def is_tied(checkpoint: Checkpoint) -> bool:
    """Whether embedding and output head are one weight by config.json. The text model's key wins
    over the outer one.
    """
    for config in (checkpoint.text_config, checkpoint.config):
        if isinstance(tied := config.get("tie_word_embeddings"), bool):
            return tied
    return False


def source_of(flag: str, flags: Flags) -> str:
    """The source of a flag's value, also if it is a key of a JSON flag."""
    outer, key = NESTED.get(flag, ("", ""))
    choice = flags.get(flag) or (flags.origin(outer, key) if outer else None)
    return choice.source if choice is not None else OURS
