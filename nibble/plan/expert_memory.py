"""Memory that nibble's experts take while they compute. Pure.

It counts beside the target's estimate for vLLM's kernels. The numbers are those of
nibble_kernels/nvfp4_moe/grouped_form.h, which a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from nibble.plan.choice import Choice, values_of
from nibble.plan.expert_kernel import uses_our_experts
from nibble.plan.expert_shapes import e4m3_shapes, expert_uses
from nibble.plan.fp4_products import serves_in_fp4
from nibble.plan.inputs import PlanInputs
from nibble.plan.nvfp4_options import asked
from nibble.plan.shared_expert import has_shared_expert, with_shared
from nibble.plan.w4a4_memory import expert_bytes, multiprocessors
from nibble.trials.trial import Shape

CHUNK = 128  # columns of x that lie together
ALIGNMENT = 128
# Tokens of a tile for up to so many pairs of a token and an expert, an expert.
FORMS = ((4.5, 8), (9.0, 16), (18.0, 32), (72.0, 64), (float("inf"), 128))
BF16_BYTES = 2
DEFAULT_TOKENS = 8192  # vLLM's default of --max-num-batched-tokens on GPUs of 70 GB or more
HOPPER = (9, 0)


class _Part(NamedTuple):
    count: int
    bytes_each: int

    @property
    def nbytes(self) -> int:
        return -(-self.count * self.bytes_each // ALIGNMENT) * ALIGNMENT


def experts_workspace_bytes(inputs: PlanInputs, args: Mapping[str, Choice], tokens: int) -> int:
    """Bytes for a batch of so many tokens, 0 where nibble's kernel computes no experts."""
    values, checkpoint = values_of(args), inputs.checkpoint
    if checkpoint is None or not uses_our_experts(values):
        return 0
    uses = expert_uses(checkpoint, values, "bf16")
    if serves_in_fp4(checkpoint, inputs.target):
        count = multiprocessors(inputs)
        return max((expert_bytes(use.shape, tokens, count) for use in uses), default=0)
    is_hopper = any(gpu.capability == HOPPER for gpu in inputs.hardware.gpus)
    e4m3 = (e4m3_bytes(shape, tokens) for shape in e4m3_shapes(checkpoint, values))
    shapes = [use.shape for use in uses]
    is_shared_on = asked(values).get("shared_expert") == "on"
    if is_hopper and is_shared_on and has_shared_expert(checkpoint):
        shapes = [with_shared(shape) for shape in shapes]
    of_shape = tiles_bytes if is_hopper else dequantized_bytes
    return max((*(of_shape(shape, tokens) for shape in shapes), *e4m3), default=0)


def most_tokens(args: Mapping[str, Choice]) -> int:
    """Of a batch."""
    return int(values_of(args).get("--max-num-batched-tokens") or DEFAULT_TOKENS)


def tiles_bytes(shape: Shape, tokens: int) -> int:
    """The kernel of tiles: x and the intermediate in the products' order, and the products."""
    experts, chosen, hidden, intermediate, _ = shape
    pairs = tokens * chosen
    form = next(size for most, size in FORMS if pairs / experts <= most)
    tiles = min(experts + pairs // form, pairs)
    ordered = form * CHUNK * BF16_BYTES
    parts = [
        _Part(tiles * -(-hidden // CHUNK), ordered),
        _Part(tiles * -(-intermediate // CHUNK), ordered),
        _Part(pairs * hidden, BF16_BYTES),
        _Part(tiles, 16),  # a tile's description
        *[_Part(pairs, 4)] * 2,  # the order of pairs, and the router's weights
        _Part(tiles, 4),
        _Part(1, 8),
    ]
    return sum(part.nbytes for part in parts)


def e4m3_bytes(shape: Shape, tokens: int) -> int:
    """E4M3 experts on every GPU: the larger weight of all experts, in BF16 and once more as it is
    stored, and the pairs' rows beside it, whose sums are in float32.
    """
    experts, chosen, hidden, intermediate, halves = shape
    weight = experts * halves * intermediate * hidden * (BF16_BYTES + 1)
    return weight + tokens * chosen * 3 * (2 * hidden + (halves + 1) * intermediate) * BF16_BYTES


def dequantized_bytes(shape: Shape, tokens: int) -> int:
    """Other GPUs: the larger weight of all experts in BF16, and the pairs' rows beside it."""
    experts, chosen, hidden, intermediate, halves = shape
    weight = experts * halves * intermediate * hidden * BF16_BYTES
    return weight + tokens * chosen * (2 * hidden + (halves + 1) * intermediate) * BF16_BYTES
