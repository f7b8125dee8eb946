"""The shapes of a model's NVFP4 and FP8 linear layers on one GPU, as vLLM builds them. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.fused_groups import fused_layer
from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.nvfp4 import EXPERT, STACKED_EXPERTS, Nvfp4Weight, dense_weights
from nibble.checkpoint.weights import kind_of
from nibble.trials.choose import E4M3_FORMS, Form, Use
from nibble.trials.trial import Shape

# Layers whose columns are split over GPUs; all others have their rows split.
SPLIT_COLUMNS = frozenset(
    "o_proj down_proj out_proj wo w2 dense_4h_to_h c_proj fc2 linear_proj".split()
)

VOCABULARY_PADDING = 64  # vllm 0.32 vocab_parallel_embedding.py:36
# What nibble's kernel for few rows takes: kernels/src/nibble_kernels/e4m3_linear.
E4M3_COLUMN_MULTIPLE, E4M3_BLOCK = 16, 128


class E4m3Weight(NamedTuple):
    """An FP8 weight of a linear layer. `form`: the scales that it has."""

    module: str
    rows: int
    columns: int
    is_draft: bool
    form: Form


def linear_uses(checkpoint: Checkpoint, tensor_parallel: int, form: Form) -> tuple[Use, ...]:
    """Each distinct shape with its number of layers, the largest first; drafts are left out.

    None for Quartet II, whose layers have one kernel for all shapes (plugin/quartet2.py).
    """
    if checkpoint.scheme.vllm_quantization == "quartet2":
        return ()
    return _uses(dense_weights(checkpoint.nvfp4), checkpoint, tensor_parallel, form)


def e4m3_uses(checkpoint: Checkpoint, tensor_parallel: int) -> tuple[Use, ...]:
    """The same for the FP8 layers that nibble's kernel for few rows takes, by their scales."""
    weights = list(e4m3_weights(checkpoint))
    found = [
        use
        for form in E4M3_FORMS
        for use in _uses(
            [weight for weight in weights if weight.form == form], checkpoint, tensor_parallel, form
        )
    ]
    return tuple(
        use
        for use in found
        if use.shape[0] % (16 if use.form == "fp8-block" else 8) == 0
        and use.shape[1] % E4M3_COLUMN_MULTIPLE == 0
    )


def e4m3_weights(checkpoint: Checkpoint) -> Iterable[E4m3Weight]:
    """E4M3 weights outside experts. Not MXFP8, and no blocks but those of 128 x 128."""
    for name, tensor in checkpoint.tensors.items():
        module = name.removesuffix(".weight")
        if tensor.dtype != "F8_E4M3" or module == name or len(tensor.shape) != 2:
            continue
        if EXPERT.match(module) or STACKED_EXPERTS.search(module):
            continue
        scales = (checkpoint.tensors.get(f"{name}_{end}") for end in ("scale", "scale_inv"))
        scale = next(filter(None, scales), None)
        if form := _form_of(tensor, scale):
            is_draft = kind_of(name, checkpoint.num_layers) == "draft"
            yield E4m3Weight(module, *tensor.shape, is_draft, form)


def _form_of(weight: TensorInfo, scale: TensorInfo | None) -> Form | None:
    if scale is None:
        return "fp8"
    if scale.dtype == "U8":
        return None
    rows, columns = weight.shape
    sizes = tuple(size for size in scale.shape if size != 1)
    if not sizes:
        return "fp8"
    if sizes == (rows,):
        return "fp8-channel"
    blocks = (-(-rows // E4M3_BLOCK), -(-columns // E4M3_BLOCK))
    return "fp8-block" if sizes == tuple(size for size in blocks if size != 1) else None


def _uses(
    weights: Iterable[Nvfp4Weight | E4m3Weight],
    checkpoint: Checkpoint,
    tensor_parallel: int,
    form: Form,
) -> tuple[Use, ...]:
    layers: defaultdict[str, list[Nvfp4Weight | E4m3Weight]] = defaultdict(list)
    for weight in weights:
        if not weight.is_draft:
            name = fused_layer(weight.module, checkpoint.model_type or "") or weight.module
            layers[name].append(weight)
    counts = Counter(
        shape
        for parts in layers.values()
        if (shape := _on_one_gpu(parts, tensor_parallel)) is not None
    )
    ordered = sorted(counts, key=lambda shape: (-shape[0] * shape[1], shape))
    return tuple(Use(shape, counts[shape], form) for shape in ordered)


def _on_one_gpu(parts: list[Nvfp4Weight | E4m3Weight], tensor_parallel: int) -> Shape | None:
    """The shape of a fused layer's part; None for a layer that does not divide."""
    rows, columns = sum(part.rows for part in parts), parts[0].columns
    name = parts[0].module.rpartition(".")[2]
    if name == "lm_head":
        rows = -(-rows // VOCABULARY_PADDING) * VOCABULARY_PADDING
    if name in SPLIT_COLUMNS:
        columns, rest = divmod(columns, tensor_parallel)
    else:
        rows, rest = divmod(rows, tensor_parallel)
    return None if rest else (rows, columns)
