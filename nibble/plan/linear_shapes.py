"""The shapes of a model's NVFP4 linear layers on one GPU, as vLLM builds them. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.fused_groups import fused_layer
from nibble.checkpoint.nvfp4 import Nvfp4Weight, dense_weights
from nibble.trials.choose import Form, Use
from nibble.trials.trial import Shape

# Layers whose columns are split over GPUs; all others have their rows split.
SPLIT_COLUMNS = frozenset(
    "o_proj down_proj out_proj wo w2 dense_4h_to_h c_proj fc2 linear_proj".split()
)

VOCABULARY_PADDING = 64  # vllm 0.32 vocab_parallel_embedding.py:36


def linear_uses(checkpoint: Checkpoint, tensor_parallel: int, form: Form) -> tuple[Use, ...]:
    """Each distinct shape with its number of layers, the largest first; drafts are left out.

    None for Quartet II, whose layers have one kernel for all shapes (plugin/quartet2.py).
    """
    if checkpoint.scheme.vllm_quantization == "quartet2":
        return ()
    layers: defaultdict[str, list[Nvfp4Weight]] = defaultdict(list)
    for weight in dense_weights(checkpoint.nvfp4):
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


def _on_one_gpu(parts: list[Nvfp4Weight], tensor_parallel: int) -> Shape | None:
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
