"""Random NVFP4 weights, their products in float64, and the comparison with a kernel's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from nibble_kernels.conversions.reference import E2M1_VALUES
from torch import Tensor

from nibble.trials.trial import Shape, shape_name

# Of |y - right| / |right| in a row: BF16's rounding of the result gives 0.003. With activations in
# FP4, kernels may choose another code near the middle of two values.
ROW_LIMITS = {"bf16": 0.01, "fp4": 0.06}
# Above 1024 rows gate and up are rounded before silu · mul.
SILU_ROW_LIMITS = {"bf16": 0.02, "fp4": 0.06}
# Of |y - right| for one result: a part of it, and a part of |x| · |w|, its largest value. In BF16
# the result has an error of 2^-9; 2^-10 of |x| · |w| is 0.06 standard deviations of a result of
# 4096 columns.
PART_OF_RESULT = 2.0**-7
PART_OF_NORMS = {"bf16": 2.0**-10, "fp4": 2.0**-7}
MOST_ROWS = 4096  # of a weight that are compared; all are computed
GLOBAL_SCALE = 2.0**-7


@dataclass(frozen=True)
class Weight:
    """Codes uint8 [N, K/2] and scales float8_e4m3fn [N, K/16], with one global scale."""

    codes: Tensor
    scales: Tensor
    global_scale: float = GLOBAL_SCALE

    @property
    def shape(self) -> Shape:
        return len(self.codes), 2 * self.codes.shape[1]


def random_weight(shape: Shape, device: str, seed: int = 0) -> Weight:
    """All codes alike, and positive scales between 0.5 and 1.5 of different exponents."""
    generator = torch.Generator(device=device).manual_seed(seed)
    rows, columns = shape
    codes = torch.randint(
        0, 256, (rows, columns // 2), dtype=torch.uint8, device=device, generator=generator
    )
    exponents = torch.rand(
        rows, columns // 16, dtype=torch.float32, device=device, generator=generator
    )
    scales = exponents + 0.5
    return Weight(codes, scales.to(torch.float8_e4m3fn))


def two_of_four(weight: Weight) -> Weight:
    """The weight with zeros for two of each four columns of a row. All pairs of places follow each
    other, so that of eight equal bytes both codes are kept.
    """
    device, (rows, columns) = weight.codes.device, weight.shape
    places = torch.combinations(torch.arange(4, device=device))
    pairs = torch.zeros(len(places), 4, dtype=torch.uint8, device=device).scatter_(1, places, 15)
    fours = torch.arange(columns // 4, device=device)
    kept = pairs[(torch.arange(rows, device=device)[:, None] + fours) % len(pairs)].flatten(1)
    return replace(weight, codes=weight.codes & (kept[:, ::2] | kept[:, 1::2] << 4))


def activations(rows: int, columns: int, device: str, seed: int = 1) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(rows, columns, device=device, generator=generator).bfloat16()


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes times scales in float64, from the table of E2M1's values alone."""
    signed = torch.tensor(
        [*E2M1_VALUES, *(-value for value in E2M1_VALUES)],
        dtype=torch.float64,
        device=codes.device,
    )
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return (
        signed[nibbles.int()].unflatten(-1, (-1, 16)) * scales.float().double()[..., None]
    ).flatten(-2)


def compared_rows(rows: int, device: str) -> Tensor:
    """Rows of a weight's upper half to compare: all, or MOST_ROWS / 2 with the first and the last
    ones. The same rows of the lower half belong to them, as up belongs to gate.
    """
    half, most = rows // 2, MOST_ROWS // 2
    if half <= most:
        return torch.arange(half, device=device)
    spread = torch.linspace(0, half - 1, most - 128, dtype=torch.float64, device=device).long()
    ends = torch.arange(64, device=device)
    return torch.cat((spread, ends, half - 1 - ends)).unique()


class Truth:
    """The results of one weight in float64, for some of its rows."""

    def __init__(self, weight: Weight) -> None:
        self.shape = weight.shape
        self.half = compared_rows(len(weight.codes), str(weight.codes.device))
        self.rows = torch.cat((self.half, self.half + len(weight.codes) // 2))
        self.values = (
            values(weight.codes[self.rows], weight.scales[self.rows]) * weight.global_scale
        )
        self.norms = self.values.norm(dim=-1)

    def fault(
        self, y: Tensor, x: Tensor, form: str, stored_x: Tensor | None = None
    ) -> tuple[str, float]:
        """Why y [rows, N] is wrong or not finite, empty if it is right, and its error.

        `stored_x`: the activations as the kernel rounds them, float64.
        """
        place = f"{shape_name(self.shape)} with {len(x)} rows"
        if y.shape != (len(x), self.shape[0]):
            return f"{place}: the result has the shape {list(y.shape)}", float("inf")
        if not y.isfinite().all():
            return f"{place}: NaN or infinity", float("nan")
        exact_x = x.double() if stored_x is None else stored_x
        right, norms = self._sums(exact_x)
        bound = PART_OF_RESULT * right.abs() + PART_OF_NORMS[form] * norms
        return judge(y[:, self.rows].double(), right, bound, ROW_LIMITS[form], place)

    def fault_of_factors(
        self, y: Tensor, x: Tensor, factors: Tensor, bias: Tensor, form: str = "bf16"
    ) -> tuple[str, float]:
        """The same for products of x, as the kernel rounds it, times a factor for each column, plus
        a bias.
        """
        place = f"{shape_name(self.shape)} with {len(x)} rows, factors and bias"
        if y.shape != (len(x), self.shape[0]) or not y.isfinite().all():
            return f"{place}: NaN or infinity", float("nan")
        sums, norms = self._sums(x.double())
        own = factors.double()[self.rows]
        right = sums * own + bias.double()[self.rows]
        bound = PART_OF_RESULT * right.abs() + PART_OF_NORMS[form] * norms * own.abs()
        return judge(y[:, self.rows].double(), right, bound, ROW_LIMITS[form], place)

    def fault_of_silu(self, y: Tensor, x: Tensor, form: str = "bf16") -> tuple[str, float]:
        """The same for silu(gate) · up of the weight's two halves."""
        place = f"{shape_name(self.shape)} with {len(x)} rows and silu"
        if y.shape != (len(x), self.shape[0] // 2) or not y.isfinite().all():
            return f"{place}: NaN or infinity", float("nan")
        sums, norms = self._sums(x.double())
        (gate, up), (of_gate, of_up) = sums.chunk(2, -1), norms.chunk(2, -1)
        right = torch.nn.functional.silu(gate) * up
        # silu's slope is at most 1.1, and its result at most |gate|.
        part = PART_OF_NORMS[form] * (1.1 * of_gate * up.abs() + of_up * gate.abs())
        bound = PART_OF_RESULT * right.abs() + part
        return judge(y[:, self.half].double(), right, bound, SILU_ROW_LIMITS[form], place)

    def _sums(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The products of the compared rows, and |x| · |w| of each."""
        return x @ self.values.T, x.norm(dim=-1)[:, None] * self.norms


def judge(y: Tensor, right: Tensor, bound: Tensor, limit: float, place: str) -> tuple[str, float]:
    """Compare results in float64. The reason of a fault, empty without one, and the error."""
    tiny = torch.finfo(torch.float64).tiny
    error = float(((y - right).norm(dim=-1) / right.norm(dim=-1).clamp(min=tiny)).max())
    if error > limit:
        return f"{place}: off by {error:.3g}, at most {limit}", error
    off = (y - right).abs() - bound
    if float(off.max()) > 0:
        row, column = divmod(int(off.argmax()), off.shape[-1])
        found, expected = float(y[row, column]), float(right[row, column])
        return f"{place}: {found:.5g} in place of {expected:.5g} (row {row}, {column})", error
    return "", error


def outcome(fault: str, error: float | None, **more: Any) -> dict[str, Any]:
    """The result of a task that compared something."""
    verdict = "right"
    if fault:
        verdict = "not finite" if fault.endswith("NaN or infinity") else "wrong"
    kept = None if error is None or not error < float("inf") else round(error, 6)
    return {"verdict": verdict, "detail": fault, "error": kept, **more}
