"""Computes expected outputs of layers for random inputs, with the kernels' reference.py.

vLLM repacks weights for its kernels after the load, so the outputs are computed before that, for a
few rows per layer. One layer of each kind is always taken, and further layers within BUDGET_S: of
linear ones some outputs, drawn at random, so that a start has time for all of them on a CPU too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from nibble_kernels.nvfp4_linear import reference as linear_reference
from nibble_kernels.nvfp4_moe import reference as moe_reference
from torch import Tensor
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from nibble.engine.contract.report import Part
from nibble.engine.plugin.report.formats import (
    FP8_RANGE,
    activation_arguments,
    codes_of,
    generator_of,
    global_scales,
    random_input,
    random_routing,
)

# Rows for the first layer of a kind: more than decode kernels handle (nvfp4_linear/README.md).
# Further layers have one row.
ROWS = 24
OUTPUTS = 128  # of a further layer
EXPERT_ROWS = 6
BLOCK = 128  # rows and columns of an E4M3 weight that share a scale
BUDGET_S = 2.0  # for further layers of a known kind


@dataclass(frozen=True)
class Probe:
    """A layer with its input and expected outputs, on the CPU.

    x: [rows, K] in the model's dtype; routing: top-k weights and ids of experts.
    expected: format of activations -> float32 [rows, N]. The formats are "plain" for an unquantized
    layer, "bf16" and "fp8" for E4M3 weights, else "bf16" and, if the checkpoint has scales for
    activations, FP4 formats. A weight-only kernel may serve such a layer too. outputs: those that
    `expected` has; all without it.
    module: a weak reference. A head that the drafter drops for another one leaves the memory.
    """

    name: str
    part: Part
    kind: str
    module: ReferenceType[Any]
    x: Tensor
    expected: dict[str, Tensor]
    routing: tuple[Tensor, Tensor] | None = None
    outputs: Tensor | None = None


class Probes:
    """The probes of this process, of the model and of its draft model."""

    def __init__(self) -> None:
        self.found: list[Probe] = []
        self.unknown: dict[
            str, int
        ] = {}  # "kind: reason" of layers without a probe -> their number
        self._kinds: set[str] = set()

    def remember(self, model: torch.nn.Module) -> None:
        """Make probes for a model whose weights are loaded but not yet repacked."""
        until = time.monotonic() + BUDGET_S
        for name, module in model.named_modules():
            kind = kind_of(module)
            is_known = kind in self._kinds
            if kind is None or (is_known and time.monotonic() > until):
                continue
            try:
                self.found.append(make_probe(name, kind, module, 1 if is_known else ROWS))
            except Exception as error:  # a format that this code does not know must not end a start
                why = (
                    str(error) if isinstance(error, Unknown) else f"{type(error).__name__}: {error}"
                )
                self.unknown[f"{kind}: {why}"] = self.unknown.get(f"{kind}: {why}", 0) + 1
            else:
                self._kinds.add(kind)

    def forget(self) -> None:
        """Free all probes."""
        self.__init__()


PROBES = Probes()


class Unknown(Exception):
    """The reason why a layer or model cannot be compared."""


def kind_of(module: Any) -> str | None:
    """Method, dtypes and shapes of a layer, which determine its kernel. None for other modules."""
    if not isinstance(module, LinearBase | ParallelLMHead | RoutedExperts):
        return None
    method = type(getattr(module, "scheme", None) or module.quant_method).__name__
    tensors = module.named_parameters(recurse=False)
    sizes = [
        f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        for name, value in tensors
        if "weight" in name
    ]
    return " ".join([method, *sizes])


@torch.inference_mode()
def make_probe(name: str, kind: str, module: Any, rows: int) -> Probe:
    """The probe of a layer. Raises Unknown for a format without a reference."""
    if isinstance(module, RoutedExperts):
        return _experts(name, kind, module)
    if type(module.quant_method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        return _unquantized(name, kind, module, rows)
    weight = getattr(module, "weight", None)
    if weight is not None and weight.dtype == torch.float8_e4m3fn:
        return _fp8(name, kind, module, rows)
    return _nvfp4(name, kind, module, rows)


def _unquantized(name: str, kind: str, module: Any, rows: int) -> Probe:
    weight = module.weight.data
    x = random_input(name, rows, weight.shape[1], None).to(weight.dtype)
    there, outputs = x.to(weight.device).float(), _outputs(name, weight, rows)
    parts = _chosen(weight, outputs).split(linear_reference.ROWS_AT_A_TIME)
    y = torch.cat([there @ part.float().T for part in parts], dim=-1)
    return Probe(name, "linear", kind, ref(module), x, {"plain": y.cpu()}, outputs=outputs)


def _outputs(name: str, weight: Tensor, rows: int) -> Tensor | None:
    """Which outputs of a layer to compare, or None for all."""
    if rows == ROWS or len(weight) <= OUTPUTS:
        return None
    generator = generator_of(f"{name} outputs")
    return torch.randperm(len(weight), generator=generator)[:OUTPUTS].sort().values


def _chosen(values: Tensor, outputs: Tensor | None) -> Tensor:
    return values if outputs is None else values[outputs.to(values.device)]


def _nvfp4(name: str, kind: str, module: Any, rows: int) -> Probe:
    scales = global_scales(module, "weight")
    if scales is None or type(module.quant_method).__module__.endswith("quartet2"):
        raise Unknown("no reference for this format")
    codes, blocks = codes_of(module, "weight"), module.weight_scale.data
    widths = torch.tensor(module.logical_widths, device=codes.device)
    # q, k and v have different global scales.
    factors = scales.reshape(-1).expand(len(widths)).repeat_interleave(widths)
    outputs = _outputs(name, codes, rows)
    # Bytes, because torch does not index E4M3 everywhere.
    kept = _chosen(blocks.view(torch.uint8), outputs).view(blocks.dtype)
    codes, factors = _chosen(codes, outputs), _chosen(factors, outputs)
    inputs = global_scales(module, "input")
    largest = inputs.max() if inputs is not None else None
    x = random_input(name, rows, codes.shape[1] * 2, largest)

    def output(inverse: Tensor | None) -> Tensor:
        one = torch.ones((), device=codes.device)
        values = x.to(codes.device).float()
        return linear_reference.nvfp4_linear(values, codes, kept, one, factors, None, inverse).cpu()

    expected = {"bf16": output(None)}
    if largest is not None:
        expected["fp4"] = output(1 / largest)
    return Probe(name, "linear", kind, ref(module), x, expected, outputs=outputs)


def _fp8(name: str, kind: str, module: Any, rows: int) -> Probe:
    """E4M3 weights with activations as they are and rounded to E4M3, as W8A8 kernels do."""
    weight = module.weight.data
    is_of_blocks, factors = _fp8_factors(module)
    outputs = _outputs(name, weight, rows)
    stored = _chosen(weight.view(torch.uint8), outputs).view(weight.dtype)
    values = stored.float() * _chosen(factors, outputs)
    scale = getattr(module, "input_scale", None)
    largest = None if scale is None else scale.data.float().max()
    x = random_input(name, rows, weight.shape[1], largest, FP8_RANGE)
    there = x.to(weight.device).float()
    rounded = _rounded_to_e4m3(there, largest, BLOCK if is_of_blocks else weight.shape[1])
    expected = {"bf16": (there @ values.T).cpu(), "fp8": (rounded @ values.T).cpu()}
    return Probe(name, "linear", kind, ref(module), x, expected, outputs=outputs)


def _fp8_factors(module: Any) -> tuple[bool, Tensor]:
    """Whether scales are of blocks, and what to multiply codes [N, K] with: [N, K] or [N, 1].

    Scales are of fused parts, of rows, or of 128 x 128 blocks. Raises Unknown for others.
    """
    rows, columns = module.weight.shape
    scale = getattr(module, "weight_scale_inv", None)
    scale = getattr(module, "weight_scale", None) if scale is None else scale
    if scale is None or scale.dtype != torch.float32:
        raise Unknown("no reference for this format")
    scale, widths = scale.data, module.logical_widths
    if scale.numel() in (1, len(widths)):
        each = torch.tensor(widths, device=scale.device)
        return False, scale.reshape(-1).expand(len(widths)).repeat_interleave(each)[:, None]
    if scale.numel() == rows:
        return False, scale.reshape(-1, 1)
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    if scale.squeeze().shape != torch.Size(size for size in blocks if size > 1):
        raise Unknown("no reference for this format")
    of_rows = scale.reshape(blocks).repeat_interleave(BLOCK, 0)[:rows]
    return True, of_rows.repeat_interleave(BLOCK, 1)[:, :columns]


def _rounded_to_e4m3(x: Tensor, scale: Tensor | None, group: int) -> Tensor:
    """x by a scale of the checkpoint, or by one for each `group` columns of a row."""
    if scale is None:
        parts = x.split(group, dim=-1)
        return torch.cat(
            [_to_e4m3(part, part.abs().amax(-1, True) / FP8_RANGE) for part in parts], -1
        )
    return _to_e4m3(x, scale)


def _to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scale).clamp(-FP8_RANGE, FP8_RANGE).to(torch.float8_e4m3fn).float() * scale


def _experts(name: str, kind: str, module: Any) -> Probe:
    g13, g2 = global_scales(module, "w13_weight"), global_scales(module, "w2_weight")
    if g13 is None or g2 is None or not hasattr(module, "w13_weight_scale"):
        raise Unknown("no reference for this format")
    parallel = module.moe_config.moe_parallel_config
    if parallel.ep_size > 1 or parallel.dp_size > 1 or module.moe_config.has_bias:
        raise Unknown("experts of several ranks, or with biases")
    w13, w2 = codes_of(module, "w13_weight"), codes_of(module, "w2_weight")
    experts = w13.shape[0]
    inputs = [global_scales(module, "w13_input"), global_scales(module, "w2_input")]
    x = random_input(
        name, EXPERT_ROWS, w13.shape[2] * 2, inputs[0].max() if inputs[0] is not None else None
    )
    weights, ids = random_routing(name, EXPERT_ROWS, experts, module.moe_config.experts_per_token)

    def output(scale13: Tensor | None, scale2: Tensor | None) -> Tensor:
        device = w13.device
        return (
            moe_reference.nvfp4_moe(
                x.to(device),
                weights.to(device),
                ids.to(device),
                w13,
                module.w13_weight_scale.data,
                g13.reshape(experts, -1),
                w2,
                module.w2_weight_scale.data,
                g2.reshape(-1),
                scale13,
                scale2,
                module.apply_router_weight_on_input,
                *activation_arguments(module),
            )
            .float()
            .cpu()
        )

    expected = {"bf16": output(None, None)}
    if inputs[0] is not None and inputs[1] is not None:
        # Some kernels use one scale per expert (the larger of gate's and up's), others the largest
        # of all experts.
        scales = [inputs[0].reshape(experts, -1).amax(1), inputs[1].reshape(experts, -1).amax(1)]
        expected["fp4"] = output(*scales)
        expected["fp4, one scale"] = output(*(scale.max().expand(experts) for scale in scales))
    return Probe(name, "moe", kind, ref(module), x, expected, (weights, ids))
