"""nibble::nvfp4_layer_products: what lies between the attentions of two dense decoder layers, in
one launch, on NVIDIA's SM90.

Three or four products with prepared NVFP4 weights, the norms before them and the residual sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nibble_kernels.library import operator
from nibble_kernels.nvfp4_linear.gpu import nvfp4_decode_linear
from nibble_kernels.nvfp4_linear.weight import GROUP, PreparedWeight
from nibble_kernels.rms_norm import rms_norm
from nibble_kernels.scale_layout import BLOCK

__all__ = ["MAX_ROWS", "Product", "fits", "new_meetings", "nvfp4_layer_products"]

# As in products.cuh and kernel.cu.
MAX_ROWS, MAX_HIDDEN, CHUNK = 8, 8192, 128
SHARED_BYTES = 227 * 1024  # of a thread block on SM90
LEAST_TILES = 4  # of a warp's ring
FIXED_BYTES = 17184  # the sums, and the barriers of the largest ring
BYTES_OF_A_TILE = 16 * 1152  # of each warp
BYTES_OF_A_CHUNK = 2 * CHUNK  # of a row of x


class Product(NamedTuple):
    """A linear layer: its prepared weight and what comes after the sum (nvfp4_decode_linear)."""

    weight: PreparedWeight
    global_scale: float
    column_scale: Tensor | None = None
    bias: Tensor | None = None


def _reference(
    attended: Tensor,
    residual: Tensor,
    second_norm: Tensor,
    next_norm: Tensor | None,
    epsilon: float,
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    outputs: Sequence[int],
    native: bool,
    global_scales: Sequence[float],
    column_scales: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    meetings: Tensor,
    division: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The specification: the operators of the parts, one after the other."""

    def product(
        number: int, x: Tensor, *, residual: Tensor | None = None, silu_mul: bool = False
    ) -> Tensor:
        weight = PreparedWeight(codes[number], scales[number], outputs[number], native)
        return nvfp4_decode_linear(
            x,
            weight,
            global_scales[number],
            column_scale=column_scales[number],
            bias=biases[number],
            residual=residual,
            silu_mul=silu_mul,
        )

    stream = product(0, attended, residual=residual)
    between = product(1, rms_norm(stream, second_norm, epsilon), silu_mul=True)
    stream = product(2, between, residual=stream)
    if next_norm is None:
        return stream, stream.new_empty((*stream.shape[:-1], 0))
    return stream, product(3, rms_norm(stream, next_norm, epsilon))


def _fake(
    attended: Tensor,
    residual: Tensor,
    second_norm: Tensor,
    next_norm: Tensor | None,
    epsilon: float,
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    outputs: Sequence[int],
    *rest: object,
) -> tuple[Tensor, Tensor]:
    rows, last = attended.shape[:-1], 0 if next_norm is None else outputs[3]
    return attended.new_empty((*rows, outputs[0])), attended.new_empty((*rows, last))


_layer_products = operator(
    "nvfp4_layer_products(Tensor attended, Tensor residual, Tensor second_norm, Tensor? next_norm,"
    " float epsilon, Tensor[] codes, Tensor[] scales, int[] outputs, bool native, float[]"
    " global_scales, Tensor?[] column_scales, Tensor?[] biases, Tensor(a!) meetings, int[]"
    " division) -> (Tensor, Tensor)",
    _reference,
    _fake,
)


def new_meetings(device: torch.device | str) -> Tensor:
    """What thread blocks of nvfp4_layer_products meet at. One serves all calls that run one after
    the other; calls of different streams need one each, and must not run at the same time.
    """
    return torch.zeros(1, dtype=torch.int32, device=device)


def fits(
    rows: int,
    hidden: int,
    columns: Sequence[int],
    device: torch.device,
    tiles: int = LEAST_TILES,
) -> bool:
    """Whether the kernel takes `rows` rows of a layer with this hidden size, whose products have
    `columns` columns, with `tiles` in each warp's ring.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        return False
    chunks = -(-max(columns) // CHUNK)
    fit = all(width % BLOCK == 0 for width in (hidden, *columns)) and hidden % (2 * GROUP) == 0
    bytes_needed = FIXED_BYTES + tiles * BYTES_OF_A_TILE + rows * chunks * BYTES_OF_A_CHUNK
    small = bytes_needed <= SHARED_BYTES and rows <= MAX_ROWS and hidden <= MAX_HIDDEN
    return fit and small and rows >= 1


def nvfp4_layer_products(
    attended: Tensor,
    residual: Tensor,
    output: Product,
    second_norm: Tensor,
    gate_up: Product,
    down: Product,
    epsilon: float,
    meetings: Tensor,
    next_norm: Tensor | None = None,
    qkv: Product | None = None,
    *,
    division: Sequence[int] = (),
) -> tuple[Tensor, Tensor | None]:
    """From attention's result [..., Q] and the residual [..., H] to the layer's sum [..., H].

        stream = residual + output(attended)
        sum = stream + down(silu · mul of gate_up(rms_norm(stream, second_norm)))
        next = qkv(rms_norm(sum, next_norm))

    Returns (sum, next); next is None without the next layer's norm and product. All are rounded
    where nvfp4_decode_linear and rms_norm round. A row's result does not depend on the other rows.
    On a GPU ask `fits` first. division: (whether bulk copies fetch the weights, slots of a warp's
    ring, tiles of a slot), for tests and measurements.
    """
    products = [output, gate_up, down]
    if next_norm is not None:
        assert qkv is not None
        products.append(qkv)
    total, following = _layer_products(
        attended,
        residual,
        second_norm,
        next_norm,
        epsilon,
        [product.weight.codes for product in products],
        [product.weight.scales for product in products],
        [product.weight.rows for product in products],
        output.weight.native,
        [product.global_scale for product in products],
        [product.column_scale for product in products],
        [product.bias for product in products],
        meetings,
        list(division),
    )
    return total, None if next_norm is None else following
