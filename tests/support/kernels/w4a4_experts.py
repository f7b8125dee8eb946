"""A layer of experts with NVFP4 activations: random weights, pairs, and each step in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.support.kernels.kernel_cases import activations, packed_weight, values_of

FUNCTIONS = ("silu", "gelu_tanh", "relu2")


def random_ids(tokens: int, topk: int, experts: int, generator: torch.Generator) -> Tensor:
    """Different experts for a token, some of another process."""
    rows = [torch.randperm(experts + 1, generator=generator)[:topk] for _ in range(tokens)]
    ids = torch.stack(rows).int()
    ids[ids == experts] = -1
    ids[0, 0] = 0
    return ids


def one_expert(tokens: int, topk: int, experts: int, _: torch.Generator) -> Tensor:
    """One expert has every token, the others none."""
    return torch.full((tokens, topk), experts - 1, dtype=torch.int32)


def one_token_each(tokens: int, topk: int, experts: int, generator: torch.Generator) -> Tensor:
    """No expert has two."""
    ids = torch.randperm(experts, generator=generator)[: tokens * topk]
    return ids.view(tokens, topk).int()


def duplicates(tokens: int, topk: int, experts: int, generator: torch.Generator) -> Tensor:
    """Tokens that have an expert more than once."""
    ids = torch.randint(0, experts, (tokens, topk), generator=generator).int()
    ids[:, -1] = ids[:, 0]
    return ids


def of_a_map(tokens: int, topk: int, experts: int, generator: torch.Generator) -> Tensor:
    """Every second expert of twice as many is here; one id is too large for any."""
    here = torch.full((2 * experts,), -1, dtype=torch.int32)
    here[::2] = torch.arange(experts, dtype=torch.int32)
    ids = here[random_ids(tokens, topk, 2 * experts, generator).clamp(min=0).long()]
    ids[-1, -1] = experts
    ids[0, 0] = 0
    return ids


def nowhere(tokens: int, topk: int, experts: int, _: torch.Generator) -> Tensor:
    """All experts are of other processes."""
    return torch.full((tokens, topk), -1, dtype=torch.int32)


@dataclass
class Layer:
    """What the operator takes, and what it must compute."""

    tokens: int
    topk: int
    experts: int
    hidden: int
    inner: int
    choose: Callable[..., Tensor] = random_ids
    function: str = "silu"
    gated: bool = True
    is_biased: bool = False
    seed: int = 0
    activation: tuple[float, float, float] = field(init=False)  # limit, alpha, beta

    def __post_init__(self) -> None:
        from nibble_kernels.nvfp4_moe.weight import prepare_experts

        generator = torch.Generator().manual_seed(self.seed)
        self.activation = (2.0, 1.702, 1.0) if self.is_biased else (math.inf, 1.0, 0.0)
        self.rows = (self.inner * (2 if self.gated else 1), self.hidden)
        self.columns = (self.hidden, self.inner)
        self.x = activations(self.tokens, self.hidden, torch.bfloat16, self.seed) / 64
        self.ids = self.choose(self.tokens, self.topk, self.experts, generator)
        self.router = torch.rand(self.tokens, self.topk, generator=generator)
        # Sums of about one in both products, of random codes with scales of every size.
        self.factors = [
            torch.rand(self.experts, 2, generator=generator) * 4e-3 + 1e-3,
            (torch.rand(self.experts, 1, generator=generator) * 4e-4 + 1e-4).expand(-1, 2),
        ]
        self.input_scales = [
            torch.rand(self.experts, generator=generator) * 2.0**-8 + 2.0**-9,
            torch.rand(self.experts, generator=generator) * 2.0**-5 + 2.0**-6,
        ]
        self.biases = [
            torch.randn(self.experts, rows, generator=generator).bfloat16()
            if self.is_biased
            else None
            for rows in self.rows
        ]
        self.weights, self.prepared = [], []
        for which, (rows, columns) in enumerate(zip(self.rows, self.columns, strict=True)):
            codes, scales = packed_weight(self.experts * rows, columns, self.seed + which)
            codes, scales = codes.view(-1, rows, columns // 2), scales.view(-1, rows, columns // 16)
            self.weights.append((codes, scales))
            self.prepared.append(prepare_experts(codes, scales, self.factors[which], native=True))

    @property
    def order(self) -> Tensor:
        """Numbers of the pairs whose expert is here, by expert."""
        ids = self.ids.flatten()
        here = ((ids >= 0) & (ids < self.experts)).nonzero().flatten()
        return here[ids[here].long().sort(stable=True).indices]

    @property
    def expert_of(self) -> Tensor:
        """Of the pairs in order."""
        return self.ids.flatten()[self.order].long()

    def quantized(self, which: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of rows for the pairs in order, as their experts quantize them."""
        from nibble_kernels.activation_quant.reference import nvfp4_quant

        codes = torch.empty(len(rows), rows.shape[1] // 2, dtype=torch.uint8)
        scales = torch.empty(len(rows), rows.shape[1] // 16, dtype=torch.float8_e4m3fn)
        for expert in self.expert_of.unique().tolist():
            own = self.expert_of == expert
            inverse = 1 / self.input_scales[which][expert]
            codes[own], found = nvfp4_quant(rows[own], inverse, tiled=False, exact=True)
            scales.view(torch.uint8)[own] = found.view(torch.uint8)
        return codes, scales

    def sums(self, which: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of the pairs in order, in float64: products of quantized rows with their experts'
        weights, with factors and biases; and sums of magnitudes.
        """
        values, experts = values_of(*self.quantized(which, rows)), self.expert_of
        sums = torch.empty(len(rows), self.rows[which], dtype=torch.float64)
        size = torch.empty_like(sums)
        for expert in experts.unique().tolist():
            own = experts == expert
            weight = values_of(*(part[expert] for part in self.weights[which]))
            scale = self.input_scales[which][expert].double()
            factor = (self.factors[which][expert].double() * scale).repeat_interleave(
                len(weight) // 2
            )
            bias = self.biases[which]
            more = torch.zeros(len(weight)) if bias is None else bias[expert]
            sums[own] = values[own] @ weight.T * factor + more.double()
            size[own] = values[own].abs() @ weight.T.abs() * factor + more.double().abs()
        return sums, size

    def exact_inner(self) -> tuple[Tensor, Tensor]:
        """The intermediate [pairs in order, inner] in float64, and the error that float32 sums, an
        approximate activation and one rounding allow.
        """
        from nibble_kernels.nvfp4_moe.reference import activate

        limit, alpha, beta = self.activation
        sums, size = self.sums(0, self.x[self.order // self.topk])
        exact = activate(sums, self.function, self.gated, False, limit, alpha, beta)
        error = size * 2.0**-20
        gate, up = sums.chunk(2, -1) if self.gated else (sums, torch.ones_like(sums))
        of_gate, of_up = error.chunk(2, -1) if self.gated else (error, torch.zeros_like(error))
        up = (up.clamp(-limit, limit) + beta).abs() if self.gated else up
        steepest = 2 * gate.abs() if self.function == "relu2" else 1.2
        through = of_gate * steepest * up + of_up * gate.clamp(max=limit).abs() * 1.2
        through += 2.0**-20 * (gate.clamp(max=limit) * up).abs()
        return exact, rounding(exact, through)

    def exact_products(self, inner: Tensor) -> tuple[Tensor, Tensor]:
        """Products [pairs in order, hidden] of an intermediate in float64, times the router's
        weights, and the error allowed.
        """
        sums, size = self.sums(1, inner)
        router = self.router.flatten()[self.order].double()[:, None]
        return sums * router, rounding(sums * router, size * router * 2.0**-20)

    def sum_of(self, products: Tensor) -> Tensor:
        """The output for products [pairs, hidden]: float32 in the order of choices."""
        ids = self.ids.flatten()
        here = (ids >= 0) & (ids < self.experts)
        products = torch.where(here[:, None], products.float(), 0.0)
        total = torch.zeros(self.tokens, self.hidden)
        for each in products.unflatten(0, (-1, self.topk)).unbind(1):
            total += each
        return total.bfloat16()


def rounding(exact: Tensor, before: Tensor) -> Tensor:
    """The error `before`, and one rounding to bfloat16 (half a unit)."""
    kind = torch.finfo(torch.bfloat16)
    return before * (1 + kind.eps) + exact.abs() * kind.eps / 2 + kind.smallest_normal
