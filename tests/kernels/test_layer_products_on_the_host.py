"""The layer kernel's own source (nvfp4_layer) without a GPU: all blocks of a grid at once, with
lanes that take turns.

Each product is compared in float64 with what the kernel itself had written before it.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.kernels.emulated import compile_on_the_host, needs_compiler, pointers
from tests.support.kernels.kernel_cases import (
    activations,
    assert_same_bits,
    packed_weight,
    values_of,
)

GLOBAL_SCALE, EPSILON = 1.23e-4, 1e-6
HALF = 1 << 31
# Rows, queries, hidden and intermediate size, qkv's outputs, blocks: half a chunk at a row's end,
# fewer groups than blocks, several rounds of groups, several tiles a warp.
CASES = [
    (1, 96, 144, 272, 80, 3),
    (4, 1280, 256, 640, 0, 2),
    (3, 256, 48, 1168, 24, 5),
    (2, 128, 384, 2064, 200, 4),
    (8, 16, 1040, 96, 1136, 1),
]

pytestmark = [needs_compiler, pytest.mark.when_changed(*OPERATORS)]


class HostProduct(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "codes", "scales", "column_scale", "bias", "residual", "norm", "out")
        ),
        ("global_scale", ctypes.c_float),
        *((name, ctypes.c_uint32) for name in ("outputs", "columns", "silu_mul")),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_on_the_host("layer_products.cpp", tmp_path_factory.mktemp("emulator"))


class Case:
    """A layer's weights, its tensors, and calls of the kernel."""

    def __init__(
        self, rows: int, queries: int, hidden: int, intermediate: int, qkv: int, dtype: torch.dtype
    ) -> None:
        self.dtype, self.count = dtype, 4 if qkv else 3
        shapes = [(hidden, queries), (2 * intermediate, hidden), (hidden, intermediate)]
        shapes += [(qkv, hidden)] if qkv else []
        self.weights = [packed_weight(*shape, seed=seed) for seed, shape in enumerate(shapes)]
        self.attended = activations(rows, queries, dtype) / 16
        self.residual = torch.randn(rows, hidden).to(dtype)
        self.norms = [(torch.rand(hidden) + 0.5).to(dtype) for _ in range(2)]
        self.factors = [torch.rand(shape[0]) + 0.5 for shape in shapes]
        self.biases = [torch.randn(shape[0]).to(dtype) for shape in shapes]

    def run(
        self,
        library: ctypes.CDLL,
        blocks: int,
        *,
        bulk: bool = True,
        together: int = 2,
        late: bool = False,
        meetings: int = 0,
        rows: slice = slice(None),
    ) -> list[Tensor]:
        """What the kernel wrote: the first sum, the MLP's middle, the second sum, qkv."""
        from nibble_kernels.nvfp4_linear.weight import prepare_weight

        native = self.dtype == torch.float16
        prepared = [prepare_weight(*weight, native) for weight in self.weights]
        attended, residual = self.attended[rows].contiguous(), self.residual[rows].contiguous()
        outs = [
            torch.full((len(attended), one.rows // (2 if number == 1 else 1)), float("nan")).to(
                self.dtype
            )
            for number, one in enumerate(prepared)
        ]
        inputs = [attended, *outs]
        residuals, norms = (
            [residual, None, outs[0], None],
            [None, self.norms[0], None, self.norms[1]],
        )
        products = (HostProduct * self.count)()
        for number, weight in enumerate(prepared):
            places = pointers(
                inputs[number],
                weight.codes,
                weight.scales,
                self.factors[number],
                self.biases[number],
                residuals[number],
                norms[number],
                outs[number],
            )
            products[number] = HostProduct(
                *places, GLOBAL_SCALE, weight.rows, inputs[number].shape[1], number == 1
            )
        counter = ctypes.c_uint32(meetings)
        library.compute_layer_on_the_host(
            self.dtype == torch.bfloat16,
            bulk,
            together,
            late,
            products,
            self.count,
            len(attended),
            ctypes.c_float(EPSILON),
            ctypes.byref(counter),
            blocks,
        )
        assert counter.value == (meetings + HALF * (self.count - 1)) % (1 << 32)
        return outs

    def check(self, outs: list[Tensor]) -> None:
        first, middle, second = outs[:3]
        self._check(0, first, self.attended, residual=self.residual)
        self._check(1, middle, first, norm=self.norms[0], silu_mul=True)
        self._check(2, second, middle, residual=first)
        if self.count == 4:
            self._check(3, outs[3], second, norm=self.norms[1])

    def _check(
        self,
        number: int,
        y: Tensor,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        norm: Tensor | None = None,
        silu_mul: bool = False,
    ) -> None:
        w, factor = values_of(*self.weights[number]), GLOBAL_SCALE * self.factors[number].double()
        bias = self.biases[number].double()
        low, high = (x, x) if norm is None else bounds_of_norm(x, norm)
        low, high = low.double(), high.double()
        sums = low @ w.T * factor + bias
        sizes = (2.0**-18 * low.abs() + (high - low).abs()) @ w.abs().T * factor + 1e-6
        if silu_mul:
            gate, up = sums.chunk(2, dim=-1)
            gate_size, up_size = sizes.chunk(2, dim=-1)
            sums = torch.nn.functional.silu(gate) * up
            sizes = 1.1 * gate_size * (up.abs() + up_size) + gate.abs() * up_size
        if residual is not None:
            sums = sums + residual.double()
        bound = sums.abs() * torch.finfo(y.dtype).eps / 2 + sizes
        assert ((y.double() - sums).abs() <= bound).all(), number


def bounds_of_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """rms_norm with a factor that is a little smaller and a little larger: mostly the same bits."""
    factor = (x.double().square().mean(-1, keepdim=True) + EPSILON).rsqrt()
    low, high = ((x.double() * factor * by).to(x.dtype) * weight for by in (1 - 1e-6, 1 + 1e-6))
    return low, high


@pytest.mark.parametrize(("bulk", "together"), [(True, 2), (True, 4), (False, 2)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_product_follows_from_the_one_before(
    library: ctypes.CDLL, kernels: object, case: tuple[int, ...], bulk: bool, together: int
) -> None:
    *sizes, blocks = case
    layer = Case(*sizes, dtype=torch.bfloat16)
    outs = layer.run(library, blocks, bulk=bulk, together=together)
    layer.check(outs)
    # Whatever is late, and from the other side of the counter, the bits are the same.
    assert_same_bits(
        tuple(layer.run(library, blocks, bulk=bulk, together=together, late=True)), tuple(outs)
    )
    again = layer.run(library, blocks, bulk=bulk, together=together, meetings=HALF)
    assert_same_bits(tuple(again), tuple(outs))


def test_float16_is_multiplied_by_native_codes(library: ctypes.CDLL, kernels: object) -> None:
    layer = Case(2, 96, 144, 272, 80, dtype=torch.float16)
    layer.check(layer.run(library, 3))


def test_a_rows_result_does_not_depend_on_the_others(library: ctypes.CDLL, kernels: object) -> None:
    layer = Case(5, 96, 144, 272, 80, dtype=torch.bfloat16)
    everything = layer.run(library, 3)
    for row in range(5):
        alone = layer.run(library, 3, rows=slice(row, row + 1))
        assert_same_bits(tuple(alone), tuple(one[row : row + 1] for one in everything), row)


@pytest.mark.parametrize(("rows", "columns"), [(1, 80000), (6, 11776), (8, 8832), (8, 8960)])
def test_what_fits_is_what_the_kernel_has_room_for(
    library: ctypes.CDLL, kernels: object, rows: int, columns: int
) -> None:
    from nibble_kernels.nvfp4_layer import SHARED_BYTES, fits

    room = library.shared_bytes_on_the_host(-(-columns // 128), rows) <= SHARED_BYTES
    assert fits(rows, 4096, (4096, columns), torch.device("cpu")) == room
