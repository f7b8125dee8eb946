"""The shapes of a model's NVFP4 and E4M3 experts on one GPU, as vLLM builds them. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.nvfp4 import EXPERT, GROUP_SIZE, STACKED_EXPERTS, Nvfp4Weight
from nibble.plan.choice import tensor_parallel_size
from nibble.trials.choose import Form, Use
from nibble.trials.trial import Shape

DOWN = ("down_proj", "w2")  # the second weight of an expert; all others are of the first
GATES = ("gate_proj", "w1", "gate_up_proj")


def expert_uses(checkpoint: Checkpoint, args: Mapping[str, Any], form: Form) -> tuple[Use, ...]:
    """Each distinct shape with its number of layers, the largest first; drafts are left out.

    None for experts that vLLM cannot divide over the GPUs of `args`.
    """
    experts, chosen = checkpoint.num_experts, checkpoint.experts_per_token
    if not experts or not chosen:
        return ()
    layers: defaultdict[str, dict[str, Nvfp4Weight]] = defaultdict(dict)
    for weight in expert_weights(checkpoint):
        if not weight.is_draft:
            layer, name = _place(weight.module)
            layers[layer].setdefault(name, weight)
    counts = Counter(
        shape
        for parts in layers.values()
        if (shape := _on_one_gpu(parts, experts, chosen, args)) is not None
    )
    ordered = sorted(counts, key=lambda shape: (-shape[0] * shape[2] * shape[3], shape))
    return tuple(Use(shape, counts[shape], form) for shape in ordered)


def expert_weights(checkpoint: Checkpoint) -> Iterable[Nvfp4Weight]:
    """The NVFP4 weights of experts, stacked or one by one."""
    return (weight for weight in checkpoint.nvfp4 if weight.experts or EXPERT.match(weight.module))


class _Matrix(NamedTuple):
    rows: int
    columns: int


def has_e4m3_experts(checkpoint: Checkpoint) -> bool:
    """Whether some experts are E4M3, or may be where no headers were read. Not MXFP8."""
    if not checkpoint.num_experts:
        return False
    if not checkpoint.tensors:
        scheme = checkpoint.scheme
        return "fp8" in scheme.activations and "MXFP8" not in scheme.name.upper()
    return any(True for _ in _e4m3_weights(checkpoint))


def e4m3_shapes(checkpoint: Checkpoint, args: Mapping[str, Any]) -> frozenset[Shape]:
    """The shapes of E4M3 experts."""
    experts, chosen = checkpoint.num_experts, checkpoint.experts_per_token
    if not experts or not chosen:
        return frozenset()
    layers: defaultdict[str, dict[str, _Matrix]] = defaultdict(dict)
    for module, matrix in _e4m3_weights(checkpoint):
        layer, name = _place(module)
        layers[layer].setdefault(name, matrix)
    shapes = (_on_one_gpu(parts, experts, chosen, args) for parts in layers.values())
    return frozenset(shape for shape in shapes if shape is not None)


def _e4m3_weights(checkpoint: Checkpoint) -> Iterable[tuple[str, _Matrix]]:
    for name, tensor in checkpoint.tensors.items():
        module = name.removesuffix(".weight")
        is_expert = EXPERT.match(module) or STACKED_EXPERTS.search(module)
        scale = checkpoint.tensors.get(f"{name}_scale")
        is_mxfp8 = scale is not None and scale.dtype == "U8"
        if tensor.dtype == "F8_E4M3" and is_expert and len(tensor.shape) > 1 and not is_mxfp8:
            yield module, _Matrix(*tensor.shape[-2:])


def _place(module: str) -> tuple[str, str]:
    """The layer's experts and the weight's name among them."""
    if match := EXPERT.match(module):
        return match[1], match[3]
    layer, _, name = module.rpartition(".")
    return layer, name if STACKED_EXPERTS.search(module) else ""


def _on_one_gpu(
    parts: Mapping[str, Nvfp4Weight | _Matrix], experts: int, chosen: int, args: Mapping[str, Any]
) -> Shape | None:
    """With expert parallelism each GPU has some of the experts, else a part of each."""
    second = next((parts[name] for name in DOWN if name in parts), None)
    if second is None:
        return None
    ranks = tensor_parallel_size(args) * int(args.get("--data-parallel-size") or 1)
    hidden, intermediate = second.rows, second.columns
    halves = 2 if any(name in parts for name in GATES) else 1
    if args.get("--enable-expert-parallel") is True:
        return (
            -(-experts // ranks),
            min(chosen, -(-experts // ranks)),
            hidden,
            intermediate,
            halves,
        )
    part, rest = divmod(intermediate, ranks)
    return None if rest or part % GROUP_SIZE else (experts, chosen, hidden, part, halves)
