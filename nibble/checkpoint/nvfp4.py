"""The NVFP4 weights of a checkpoint by their headers: their tensors and their defects.

A linear weight [N, K] is two E2M1 codes a byte [N, K/2], one E4M3 scale for 16 of them [N, K/16],
one fp32 scale for all, and for W4A4 one for the activations. Experts are stored one by one, or all
of a layer in three dimensions with K in the middle: codes [E, K/2, N], scales [E, K/16, N].
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.weights import kind_of
from nibble.errors import ExitCode, NibbleError

Layout = Literal["modelopt", "compressed-tensors", "quartet2"]
GROUP_SIZE = 16
TILE_ROWS, TILE_COLUMNS = 128, 4  # of the 128x4 layout of scales (cuBLAS, block scaling factors)
EXPERT = re.compile(r"^(.+\.experts)\.(\d+)\.(\w+)$")
STACKED_EXPERTS = re.compile(r"\.experts\.(?:gate_up_proj|down_proj)$")

# Ends of names beside a module's own: (codes, block scales, scale of all, scale of activations)
LEAVES: Mapping[str, tuple[str, str, str, str]] = {
    "modelopt": (".weight", ".weight_scale", ".weight_scale_2", ".input_scale"),
    "stacked": ("", "_weight_scale", "_weight_scale_2", "_input_scale"),
    "compressed-tensors": (
        ".weight_packed",
        ".weight_scale",
        ".weight_global_scale",
        ".input_global_scale",
    ),
}


class Nvfp4Weight(NamedTuple):
    """One NVFP4 weight [rows, columns], or `experts` of them stacked (0: not stacked).

    `scale`, `global_scale` and `input_scale` are None where the checkpoint has no such tensor;
    `leaves` are the ends of their names. `global_scale` is a multiplier, in compressed-tensors a
    divisor.
    """

    module: str
    layout: Layout
    leaves: tuple[str, str, str, str]
    rows: int
    columns: int
    experts: int
    is_draft: bool
    weight: TensorInfo
    scale: TensorInfo | None
    global_scale: TensorInfo | None
    input_scale: TensorInfo | None

    @property
    def tiles_evenly(self) -> bool:
        """Whether the scales fill whole 128x4 tiles, so that tiled and row-major ones take the
        same bytes.
        """
        return self.rows % TILE_ROWS == 0 and self.columns % (GROUP_SIZE * TILE_COLUMNS) == 0


@dataclass(frozen=True)
class Problem:
    """Why a checkpoint cannot be served: tensor, file, what is wrong, and how many `others` are
    alike.

    `is_draft`: only multi-token prediction would load the tensor.
    """

    kind: str
    code: ExitCode
    tensor: str
    file: str
    what: str
    expected: str
    is_draft: bool = False
    others: int = 0

    @classmethod
    def of(
        cls, kind: str, tensor: TensorInfo, what: str, expected: str, is_draft: bool = False
    ) -> Problem:
        """The problem of a damaged tensor."""
        return cls(kind, ExitCode.MODEL, tensor.name, tensor.file, what, expected, is_draft)

    def error(self, where: str) -> NibbleError:
        """The problem as an error; `where` is the folder or id of the file."""
        more = f" ({self.others} more like it)" if self.others else ""
        place = f"{where}/{self.file}" if self.file else where
        action = "download the model again, or report it to its publisher"
        if self.code is ExitCode.CONFIG:
            action = "choose another export of this model"
        return NibbleError(
            self.code,
            what=f"{self.tensor} in {place} {self.what}{more}",
            expected=self.expected,
            action=action,
        )


def find_weights(
    tensors: Mapping[str, TensorInfo],
    *,
    is_quartet2: bool,
    only_nvfp4: bool,
    num_layers: int | None,
) -> tuple[Nvfp4Weight, ...]:
    """The NVFP4 weights among `tensors`.

    `only_nvfp4`: the config declares no other packed format, so that codes whose scales are missing
    are NVFP4 too.
    """
    found = []
    for tensor in tensors.values():
        if tensor.dtype not in ("U8", "F4") or len(tensor.shape) not in (2, 3):
            continue
        split = _split(tensor.name)
        if split is None:
            continue
        form, module = split
        leaves = LEAVES[form]
        _, scale, global_scale, input_scale = (tensors.get(module + leaf) for leaf in leaves)
        if scale is None and global_scale is None and not only_nvfp4:
            continue
        if scale is not None and scale.dtype != "F8_E4M3" and not only_nvfp4:
            continue
        stacked = len(tensor.shape) == 3
        rows = tensor.shape[-1] if stacked else tensor.shape[0]
        columns = tensor.shape[1] * (1 if tensor.dtype == "F4" else 2)
        layout: Layout = "compressed-tensors" if form == "compressed-tensors" else "modelopt"
        if is_quartet2 and layout == "modelopt":
            layout = "quartet2"
        is_draft = kind_of(tensor.name, num_layers) == "draft"
        experts = tensor.shape[0] if stacked else 0
        found.append(Nvfp4Weight(module, layout, leaves, rows, columns, experts, is_draft, tensor,
                                 scale, global_scale, input_scale))  # fmt: skip
    return tuple(found)


def _split(name: str) -> tuple[str, str] | None:
    """(form, module) of a tensor that may hold codes."""
    if name.endswith(".weight"):
        return "modelopt", name.removesuffix(".weight")
    if name.endswith(".weight_packed"):
        return "compressed-tensors", name.removesuffix(".weight_packed")
    return ("stacked", name) if STACKED_EXPERTS.search(name) else None


def header_problems(weights: Iterable[Nvfp4Weight], w4a4: Container[str]) -> tuple[Problem, ...]:
    """What the headers alone show: missing tensors, wrong types and shapes; the first of each kind.

    `w4a4`: modules whose activations are NVFP4 too: vLLM 0.32 would use uninitialised memory for a
    missing activation scale (modelopt.py KNvfp4Static: torch.empty).
    """
    known = list(weights)
    found = [
        problem for weight in known for problem in _weight_problems(weight, weight.module in w4a4)
    ]
    return gather([*found, *_expert_problems(known)])


def gather(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """The first problem of each kind with the number of others."""
    first: dict[tuple[str, bool], Problem] = {}
    count: defaultdict[tuple[str, bool], int] = defaultdict(int)
    for problem in problems:
        key = (problem.kind, problem.is_draft)
        first.setdefault(key, problem)
        count[key] += 1
    return tuple(replace(problem, others=count[key] - 1) for key, problem in first.items())


def _weight_problems(weight: Nvfp4Weight, needs_input_scale: bool) -> Iterator[Problem]:
    codes = weight.weight
    _, scale, global_scale, input_scale = (weight.module + leaf for leaf in weight.leaves)

    def problem(kind: str, code: ExitCode, tensor: str, what: str, expected: str) -> Problem:
        return Problem(kind, code, tensor, codes.file, what, expected, weight.is_draft)

    if weight.layout != "quartet2" and codes.dtype != "U8":
        yield problem(
            "codes dtype",
            ExitCode.CONFIG,
            codes.name,
            f"is {codes.dtype}",
            "two codes a U8, as vLLM 0.32 reads it",
        )
    if weight.columns % GROUP_SIZE:
        what = f"has {weight.columns} input features"
        yield problem("columns", ExitCode.CONFIG, codes.name, what, "a multiple of 16")
    if weight.scale is None:
        yield problem(
            "no scale", ExitCode.MODEL, scale, "is missing", f"block scales beside {codes.name}"
        )
    else:
        yield from _scale_problems(weight, weight.scale)
    count = max(1, weight.experts)
    for name, tensor, needed in (
        (global_scale, weight.global_scale, True),
        (input_scale, weight.input_scale, needs_input_scale),
    ):
        leaf = name.rpartition(".")[2]
        if tensor is None and needed:
            yield problem(
                f"no {leaf}", ExitCode.MODEL, name, "is missing", f"a scale beside {codes.name}"
            )
        if tensor is not None and (tensor.dtype != "F32" or tensor.elements not in (1, count)):
            what = f"is {tensor.dtype} of shape {list(tensor.shape)}"
            yield problem(
                f"{leaf} shape",
                ExitCode.MODEL,
                name,
                what,
                f"F32 of {count} element{'s' * (count > 1)}",
            )


def _scale_problems(weight: Nvfp4Weight, scale: TensorInfo) -> Iterator[Problem]:
    rows, blocks = weight.rows, weight.columns // GROUP_SIZE
    expected = (weight.experts, blocks, rows) if weight.experts else (rows, blocks)

    def problem(kind: str, code: ExitCode, what: str, wanted: str) -> Problem:
        return Problem(kind, code, scale.name, scale.file, what, wanted, weight.is_draft)

    if scale.dtype != "F8_E4M3":
        yield problem("scale dtype", ExitCode.CONFIG, f"is {scale.dtype}", "F8_E4M3")
    if scale.shape == expected or weight.columns % GROUP_SIZE:
        return
    stored = (
        scale.shape[-2]
        if weight.experts and len(scale.shape) == 3
        else scale.shape[-1]
        if scale.shape
        else 1
    )
    if scale.shape == (_up(rows, TILE_ROWS), _up(blocks, TILE_COLUMNS)):
        what = f"has shape {list(scale.shape)}, that of scales padded for the 128x4 tiled layout"
        yield problem(
            "scale tiles", ExitCode.CONFIG, what, f"row-major scales of shape {list(expected)}"
        )
    elif (
        stored
        and stored != blocks
        and weight.columns % stored == 0
        and scale.shape[:1] == expected[:1]
    ):
        size = weight.columns // stored
        what = f"has one scale for {size} weights (shape {list(scale.shape)})"
        yield problem("group size", ExitCode.CONFIG, what, f"groups of 16, shape {list(expected)}")
    else:
        yield problem(
            "scale shape", ExitCode.MODEL, f"has shape {list(scale.shape)}", f"{list(expected)}"
        )


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def dense_weights(weights: Iterable[Nvfp4Weight]) -> list[Nvfp4Weight]:
    """The weights of linear layers, without experts."""
    return [weight for weight in weights if not weight.experts and not EXPERT.match(weight.module)]


def _expert_problems(weights: Iterable[Nvfp4Weight]) -> Iterator[Problem]:
    """Experts missing from the middle of a layer: vLLM 0.32 allocates all and checks none."""
    layers: defaultdict[tuple[str, str], dict[int, Nvfp4Weight]] = defaultdict(dict)
    for weight in weights:
        if match := EXPERT.match(weight.module):
            layers[match[1], match[3]][int(match[2])] = weight
    sizes: defaultdict[str, int] = defaultdict(int)
    for (layer, _), experts in layers.items():
        sizes[layer] = max(sizes[layer], 1 + max(experts))
    for (layer, projection), experts in layers.items():
        absent = next((number for number in range(sizes[layer]) if number not in experts), None)
        if absent is not None:
            some = next(iter(experts.values()))
            name = f"{layer}.{absent}.{projection}{some.leaves[0]}"
            what = (
                f"is missing or not NVFP4, as {len(experts)} of {sizes[layer]} experts of its"
                " layer are"
            )
            yield Problem(
                "expert",
                ExitCode.MODEL,
                name,
                some.weight.file,
                what,
                "all experts of a layer in one format",
                some.is_draft,
            )
