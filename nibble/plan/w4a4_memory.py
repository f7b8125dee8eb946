"""Memory that nibble's W4A4 kernels take while they compute. Pure.

It counts beside the target's estimate for vLLM's kernels. The numbers are those of
nibble_kernels/nvfp4_linear/w4a4.cuh and nvfp4_moe/w4a4_form.h, which tests compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from nibble.plan.choice import Choice, tensor_parallel_size, values_of
from nibble.plan.fp4_products import serves_in_fp4
from nibble.plan.inputs import PlanInputs
from nibble.plan.linear_shapes import linear_uses
from nibble.plan.nvfp4_options import asked
from nibble.trials.trial import Shape

CHUNK = 128  # columns that are multiplied together
ALIGNMENT = 128
BLOCK, SCALE_TILE = 16, (128, 4)
BF16_BYTES = 2
TILE_BYTES, PAIR_BYTES, FLAG_BYTES = 16, 16, 8 * 4
SUM_BYTES = 512  # of a token of a tile, for each multiprocessor
MOST_TOKENS = 128  # of a tile
TILES = (16, 32, 64, MOST_TOKENS)


class _Part(NamedTuple):
    count: int
    bytes_each: int

    @property
    def nbytes(self) -> int:
        return _up(self.count * self.bytes_each, ALIGNMENT)


def linear_workspace_bytes(inputs: PlanInputs, args: Mapping[str, Choice], tokens: int) -> int:
    """Bytes of the largest linear layer for so many tokens, 0 where nibble's W4A4 kernel multiplies
    none.
    """
    values, checkpoint = values_of(args), inputs.checkpoint
    is_ours = asked(values).get("linear_kernel") == "nibble"
    if checkpoint is None or not is_ours or not serves_in_fp4(checkpoint, inputs.target):
        return 0
    uses = linear_uses(checkpoint, tensor_parallel_size(values), "fp4")
    count = multiprocessors(inputs)
    return max((linear_bytes(use.shape, tokens, count) for use in uses), default=0)


def linear_bytes(shape: Shape, tokens: int, count: int) -> int:
    """Codes and scales of x, and the multiprocessors' sums of a slice."""
    columns, (rows, blocks) = shape[1], SCALE_TILE
    scales = _up(tokens, rows) * _up(-(-columns // BLOCK), blocks)
    return tokens * columns // 2 + scales + count * (MOST_TOKENS * SUM_BYTES + FLAG_BYTES)


def expert_bytes(shape: Shape, tokens: int, count: int) -> int:
    """x and the intermediate in BF16 and in FP4, the products and the multiprocessors' sums."""
    experts, chosen, hidden, inner, _ = shape
    pairs = tokens * chosen
    twice = 2 * -(-pairs // experts)
    tile = next(size for size in TILES if twice <= size or size == MOST_TOKENS)
    tiles = min(experts + pairs // tile, pairs)
    stored = tile * CHUNK * 9 // 16
    parts = [
        _Part(tiles * -(-hidden // CHUNK), stored),
        _Part(tiles * -(-inner // CHUNK), stored),
        _Part(pairs * inner, BF16_BYTES),
        _Part(pairs * hidden, BF16_BYTES),
        _Part(tiles, TILE_BYTES),
        _Part(pairs, PAIR_BYTES),
        _Part(1, 8),
        _Part(2 * count, FLAG_BYTES),
        _Part(count * tile, SUM_BYTES),
    ]
    return sum(part.nbytes for part in parts)


def multiprocessors(inputs: PlanInputs) -> int:
    """Of the largest GPU here; of the target's largest where a product is unknown."""
    known = {model.match: model.sm_count for model in inputs.target.gpu_models}
    found = [inputs.target.gpu_model(gpu.name) for gpu in inputs.hardware.gpus]
    return max((model.sm_count if model else max(known.values()) for model in found), default=0)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
