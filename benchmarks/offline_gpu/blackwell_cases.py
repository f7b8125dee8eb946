"""Writes the cases of blackwell_proof.cu: inputs as nibble-kernels prepares them, the float64
result and the error that float32 sums and one rounding allow.

    python benchmarks/offline_gpu/blackwell_cases.py cases.bin
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests/kernels"))

import test_fp8_linear as fp8
import test_mma_fp4_on_the_host as tiles
from test_nvfp4_sparse import sparse_weight

from tests.support.kernels.kernel_cases import (
    activations,
    fitting_scale,
    packed_weight,
    values_of,
)
from tests.support.kernels.w4a4_experts import (
    FUNCTIONS,
    Layer,
    duplicates,
    nowhere,
    of_a_map,
    one_expert,
    one_token_each,
    random_ids,
)

GLOBAL_SCALE = 1.23e-4
TILES = 500  # of each kind
W4A4 = [
    # Tokens, N, K, multiprocessors: GB10's 48, RTX PRO 6000's 188, H200's 132, and few.
    *((17, 264, 1056, 48), (32, 1024, 2048, 48), (32, 136, 4096, 188), (40, 392, 544, 5)),
    *((64, 520, 1184, 132), (100, 272, 416, 3), (128, 1024, 1024, 188), (300, 264, 1056, 132)),
    *((512, 512, 2048, 48), (512, 1032, 512, 188), (33, 8, 32, 48), (129, 3072, 256, 132)),
]
EXPERTS = [
    # Tokens, experts a token, experts, hidden, intermediate; who has which; multiprocessors.
    *(((1, 8, 128, 512, 192), random_ids, 48), ((16, 16, 64, 512, 256), random_ids, 188)),
    *(((5, 10, 512, 256, 128), random_ids, 132), ((40, 4, 60, 272, 1408), random_ids, 48)),
    *(((64, 1, 64, 256, 176), one_token_each, 132), ((130, 1, 64, 272, 144), one_expert, 48)),
    *(((300, 2, 64, 144, 128), duplicates, 132), ((200, 8, 64, 272, 144), random_ids, 188)),
    *(((700, 6, 64, 144, 80), of_a_map, 132), ((3, 4, 16, 144, 48), nowhere, 48)),
    *(((2, 1, 64, 48, 16), random_ids, 188), ((33, 4, 256, 2064, 80), random_ids, 5)),
]
FP8 = [(1, 32, 144), (8, 1024, 4096), (13, 136, 1152), (30, 24, 400), (64, 512, 2064)]
SPARSE = [(1, 24, 176), (8, 1024, 4096), (13, 32, 1056), (16, 2048, 2000), (40, 520, 5120)]


def write(
    file: IO[bytes],
    op: str,
    name: str,
    numbers: list[int],
    inputs: list[Tensor | None],
    expected: Tensor,
    bound: Tensor,
) -> None:
    def number(value: int) -> None:
        file.write(struct.pack("<q", value))

    def text(value: str) -> None:
        number(len(value))
        file.write(value.encode())

    text(op)
    text(name)
    number(len(numbers))
    for one in numbers:
        number(int(one))
    text(repr(GLOBAL_SCALE))
    number(len(inputs))
    for tensor in inputs:
        data = b"" if tensor is None else bytes_of(tensor)
        number(len(data))
        file.write(data)
    number(expected.numel())
    file.write(bytes_of(expected.double()) + bytes_of((bound * (1 + 2.0**-23)).float()))


def bytes_of(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def bound_of(size: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """16 units of the sum of magnitudes, and half a unit of the result."""
    kind = torch.finfo(dtype)
    return size * 2.0**-20 + exact.abs() * kind.eps / 2 + kind.smallest_normal


def finished(
    sums: Tensor, size: Tensor, dtype: torch.dtype, silu_mul: bool
) -> tuple[Tensor, Tensor]:
    if not silu_mul:
        return sums, bound_of(size, sums, dtype)
    gate, up = sums.chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up
    of_gate, of_up = size.chunk(2, -1)
    # |d silu(x)/dx| < 1.1; 2^-20 also covers the approximate exponential and division.
    further = (1.1 * of_gate * up.abs() + gate.abs() * of_up) * 2.0**-19
    return exact, bound_of(exact.abs(), exact, dtype) + further


def w4a4_cases(file: IO[bytes]) -> None:
    from nibble_kernels.activation_quant.reference import nvfp4_quant
    from nibble_kernels.nvfp4_linear.weight import prepare_weight

    for number, (tokens, rows, columns, multiprocessors) in enumerate(W4A4):
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        silu_mul = number % 3 == 2
        codes, scales = packed_weight(rows, columns, number)
        x = activations(tokens, columns, torch.bfloat16, number)
        inverse = fitting_scale(x, 0.01 if silu_mul else 1)
        x_codes, tiled = nvfp4_quant(x, inverse, tiled=True, exact=True)
        _, linear = nvfp4_quant(x, inverse, tiled=False, exact=True)
        values, weight = values_of(x_codes, linear), values_of(codes, scales)
        factors, bias = (torch.rand(rows) + 0.5) / 16, torch.randn(rows).to(dtype)
        factor = GLOBAL_SCALE * factors.double()
        sums = values @ weight.T * factor + bias.double()
        size = values.abs() @ weight.abs().T * factor + bias.double().abs()
        prepared = prepare_weight(codes, scales, native=True)
        write(
            file,
            "w4a4",
            f"{tokens} x {rows} x {columns}, {multiprocessors} blocks, {dtype}, silu {silu_mul}",
            [tokens, rows, columns, silu_mul, dtype == torch.float16, multiprocessors],
            [x_codes, tiled, prepared.codes, prepared.scales, factors, bias],
            *finished(sums, size, dtype, silu_mul),
        )


def experts_cases(file: IO[bytes]) -> None:
    """Both products apart: the program must compute the intermediate from x, and the output from
    the intermediate that is given. An error in the first would change codes of the second. The
    last values are zero where both at once give the same bits as one after the other.
    """
    for number, (shape, choose, multiprocessors) in enumerate(EXPERTS):
        function, gated = (("silu", True), ("gelu_tanh", True), ("relu2", False))[number % 3]
        is_biased = number % 2 == 1
        if not is_biased:
            function, gated = "silu", True
        layer = Layer(
            *shape, choose=choose, function=function, gated=gated, is_biased=is_biased, seed=number
        )
        inner, inner_bound = layer.exact_inner()
        given = inner.bfloat16()
        products, bound = layer.exact_products(given)
        # Each product is rounded to bfloat16 before they are added up in float32.
        token, size = layer.order // layer.topk, torch.zeros(layer.tokens, layer.hidden).double()
        out, allowed = size.clone(), size.clone()
        out.index_add_(0, token, products)
        allowed.index_add_(0, token, bound)
        size.index_add_(0, token, products.abs())
        allowed += bound_of(size, out, torch.bfloat16)
        weights = [
            part
            for which, prepared in enumerate(layer.prepared)
            for part in (*prepared[:3], layer.input_scales[which], layer.biases[which])
        ]
        options = [FUNCTIONS.index(function), gated, multiprocessors, len(layer.order)]
        write(
            file,
            "experts",
            f"{' x '.join(map(str, shape))}, {choose.__name__}, {multiprocessors} blocks,"
            f" {function}, biased {is_biased}",
            [*shape[:4], False, shape[4], *options],
            [layer.x, layer.ids, layer.router, *weights, torch.tensor(layer.activation), given],
            torch.cat([inner.flatten(), out.flatten(), torch.zeros(out.numel())]),
            torch.cat([inner_bound.flatten(), allowed.flatten(), torch.zeros(out.numel())]),
        )


def fp8_cases(file: IO[bytes]) -> None:
    for number, shape in enumerate(FP8):
        for kind in fp8.KINDS:
            dtype = (torch.bfloat16, torch.float16)[number % 2]
            tokens, rows, columns = shape
            x, weight = fp8.eighths(tokens, columns, 0), fp8.eighths(rows, columns, 1)
            scales = fp8.scales_of(kind, shape)
            left, right = (
                fp8.scaled(x, scales[0], kind, 1),
                fp8.scaled(weight, scales[1], kind, 128),
            )
            bias = torch.randn(rows).to(dtype)
            sums, size = left @ right.T + bias.double(), left.abs() @ right.abs().T
            one_scale = [one.numel() == 1 for one in scales]
            write(
                file,
                "fp8",
                f"{tokens} x {rows} x {columns}, {kind}, {dtype}",
                [*shape, kind == "blocks", dtype == torch.float16, *one_scale],
                [x, weight, *scales, bias],
                sums,
                bound_of(size + bias.double().abs(), sums, dtype),
            )


def sparse_cases(file: IO[bytes]) -> None:
    from nibble_kernels.nvfp4_sparse import pack_sparse

    for number, (tokens, rows, columns) in enumerate(SPARSE):
        for dtype in (torch.bfloat16, torch.float16):
            silu_mul = number == 1
            codes, scales = sparse_weight(rows, columns)
            x = activations(tokens, columns, dtype) / (64 if silu_mul else 1)
            packed = pack_sparse(codes, scales, native=dtype == torch.float16)
            values, weight = x.double(), values_of(codes, scales)
            factors, bias = torch.rand(rows) + 0.5, torch.randn(rows).to(dtype)
            factor = GLOBAL_SCALE * factors.double()
            sums = values @ weight.T * factor + bias.double()
            size = values.abs() @ weight.abs().T * factor + bias.double().abs()
            write(
                file,
                "sparse",
                f"{tokens} x {rows} x {columns}, {dtype}, silu {silu_mul}",
                [tokens, rows, columns, silu_mul, dtype == torch.float16],
                [x, *packed[:3], factors, bias],
                *finished(sums, size, dtype, silu_mul),
            )


def tile_cases(file: IO[bytes]) -> None:
    """Tiles of random codes; sums of the first kind are exact."""
    for sparse in (False, True):
        for kind in ("powers of two", "any scales"):
            parts: list[tuple[Any, ...]] = [
                tiles.a_tile(seed, kind, (1, 3), sparse, start=False) for seed in range(500)
            ]
            operands, exact, size = zip(*parts, strict=True)
            in_lanes = torch.stack([tiles.sums_in_lanes(one) for one in exact])
            sizes = torch.stack([tiles.sums_in_lanes(one) for one in size])
            # Twice the host's bound: a tensor core's additions truncate (Fasi et al. 2021,
            # Numerical behavior of NVIDIA tensor cores).
            allowed = 0 if kind == "powers of two" else 18 * 2.0**-24
            write(
                file,
                "tiles",
                f"{'sparse' if sparse else 'dense'}, {kind}",
                [TILES, sparse],
                [torch.stack(one) for one in zip(*operands, strict=True)],
                in_lanes,
                sizes * allowed,
            )


if __name__ == "__main__":
    torch.manual_seed(0)
    with Path(sys.argv[1]).open("wb") as output:
        tile_cases(output)
        w4a4_cases(output)
        experts_cases(output)
        fp8_cases(output)
        sparse_cases(output)
