"""Weights that vLLM 0.32 computes as one: their format, and how their fp32 scales merge.

Without nibble's plugin, vLLM takes one scale for all parts of a fused layer: the largest multiplier
in ModelOpt's format (modelopt.py KNvfp4Static.process), the smallest in compressed-tensors' (the
largest divisor, compressed_tensors_w4a4_nvfp4.py:105), and the gate's of an expert's gate and up.
The error is a gain: a part is multiplied by (scale taken) / (its scale).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Literal

from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.nvfp4 import EXPERT, STACKED_EXPERTS, Nvfp4Weight, Problem, gather
from nibble.checkpoint.scale_values import NAN, TensorFiles, e4m3_value
from nibble.errors import ExitCode

# Parts of one fused layer by the ends of their names: packed_modules_mapping of vllm 0.32
# models/*.py.
FUSED: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("c_fc_0", "c_fc_1"),
)
_GROUP_OF = {part: parts for parts in FUSED for part in parts}
# Models in which these two stay apart (vllm 0.32 minicpm3.py:85, sarvam.py:138).
_LATENT, _LATENT_APART = ("q_a_proj", "kv_a_proj_with_mqa"), ("minicpm3", "sarvam_mla")

Quality = Literal["equal", "foldable", "column scale", "expert factor", "unread"]
"""How the parts are merged exactly: nothing to do; into the block scales; by a factor an output
after the GEMM; by a factor on the expert's second weight. "unread": the scales differ by a ratio
that may fold, which only the block scales tell."""


@dataclass(frozen=True)
class FusedGroup:
    """One fused layer: its parts, their multipliers, how they merge, and the worst part's gain
    error without the plugin.
    """

    name: str
    parts: tuple[Nvfp4Weight, ...]
    scales: tuple[float, ...]
    is_expert: bool
    quality: Quality
    gain_error: float
    worst_part: str


def fused_layer(module: str, model_type: str = "") -> str | None:
    """The layer that vLLM 0.32 builds of `module` and others in one format; None for a module that
    vLLM does not fuse.
    """
    if match := EXPERT.match(module):
        return match[1]
    parent, _, part = module.rpartition(".")
    if parent.endswith(".experts"):
        return parent
    parts = _GROUP_OF.get(part)
    if parts is None or (parts == _LATENT and model_type in _LATENT_APART):
        return None
    return f"{parent}.{'+'.join(parts)}"


def format_problems(
    weights: Sequence[Nvfp4Weight],
    w4a4: Container[str],
    tensors: Mapping[str, TensorInfo],
    model_type: str,
) -> tuple[Problem, ...]:
    """Layers with parts in other formats beside NVFP4 ones, which vLLM 0.32 refuses
    (quant_utils.py:678, modelopt.py:1750, compressed_tensors/utils.py:67) or cannot fill. `w4a4`:
    modules whose activations are NVFP4 too.
    """
    formats = {w.weight.name: "NVFP4" if w.module in w4a4 else "W4A16_NVFP4" for w in weights}
    first: dict[str, Nvfp4Weight] = {}
    for weight in weights:
        if layer := fused_layer(weight.module, model_type):
            first.setdefault(layer, weight)
    found = []
    for tensor in tensors.values():
        module, _, leaf = tensor.name.rpartition(".")
        if STACKED_EXPERTS.search(tensor.name):
            module = tensor.name
        elif leaf not in ("weight", "weight_packed"):
            continue
        layer = fused_layer(module, model_type)
        if layer not in first:
            continue
        other, stored = first[layer], formats.get(tensor.name, tensor.dtype)
        if stored != formats[other.weight.name]:
            what = f"is {stored}, and {other.module} is {formats[other.weight.name]}"
            expected = f"one format for all of {layer}, which vLLM builds as one layer"
            found.append(
                Problem(
                    "fused formats",
                    ExitCode.CONFIG,
                    tensor.name,
                    tensor.file,
                    what,
                    expected,
                    other.is_draft,
                )
            )
    return gather(found)


def fused_groups(
    weights: Iterable[Nvfp4Weight], values: Mapping[str, tuple[float, ...]], folder: Path | None
) -> list[FusedGroup]:
    """Every fused layer of `weights`. `values` are their fp32 scales by tensor; block scales are
    read from `folder`.
    """
    members: defaultdict[tuple[str, tuple[str, ...]], dict[str, Nvfp4Weight]] = defaultdict(dict)
    for weight in weights:
        parent, _, part = weight.module.rpartition(".")
        if part in _GROUP_OF and weight.layout != "quartet2" and weight.global_scale is not None:
            members[parent, _GROUP_OF[part]][part] = weight
    found = []
    for (parent, names), parts in members.items():
        ordered = tuple(parts[name] for name in names if name in parts)
        scales = [_multiplier(weight, values) for weight in ordered]
        if len(ordered) > 1 and all(scale is not None for scale in scales):
            known = tuple(scale for scale in scales if scale is not None)
            found.append(
                _group(
                    f"{parent}.{'+'.join(w.module.rpartition('.')[2] for w in ordered)}",
                    ordered,
                    known,
                    folder,
                )
            )
    return found


def _multiplier(weight: Nvfp4Weight, values: Mapping[str, tuple[float, ...]]) -> float | None:
    """The weight's fp32 scale as a multiplier; None for a damaged or missing one."""
    assert weight.global_scale is not None
    stored = values.get(weight.global_scale.name, ())
    if len(stored) != 1 or not 0 < stored[0] < float("inf"):
        return None
    return 1 / stored[0] if weight.layout == "compressed-tensors" else stored[0]


def _group(
    name: str, parts: tuple[Nvfp4Weight, ...], scales: tuple[float, ...], folder: Path | None
) -> FusedGroup:
    is_expert = EXPERT.match(parts[0].module) is not None
    largest_divisor = parts[0].layout == "compressed-tensors"
    dense = min(scales) if largest_divisor else max(scales)
    taken = scales[0] if is_expert else dense
    errors = [abs(taken / scale - 1) for scale in scales]
    worst = max(range(len(parts)), key=errors.__getitem__)
    quality = "expert factor" if is_expert else _quality(parts, scales, folder)
    if len(set(scales)) == 1:
        quality = "equal"
    return FusedGroup(name, parts, scales, is_expert, quality, errors[worst], parts[worst].module)


def _quality(
    parts: tuple[Nvfp4Weight, ...], scales: tuple[float, ...], folder: Path | None
) -> Quality:
    """ "foldable" where, with the scale of one part, every block scale of the others stays an E4M3
    value (nibble_kernels.merge).
    """
    plausible = [
        common
        for common in set(scales)
        if all(unrepresentable(_ratio(scale, common)) is not None for scale in scales)
    ]
    if not plausible:
        return "column scale"
    if folder is None:
        return "unread"
    with TensorFiles(folder) as files:
        present = [_present(files, part) for part in parts]
    for common in plausible:
        lost = [unrepresentable(_ratio(scale, common)) for scale in scales]
        if not any(bad is None or bad & there for bad, there in zip(lost, present, strict=True)):
            return "foldable"
    return "column scale"


def _ratio(own: float, common: float) -> Fraction:
    return Fraction(own) / Fraction(common)


def _present(files: TensorFiles, weight: Nvfp4Weight) -> frozenset[int]:
    """The bytes that occur among the block scales of `weight`."""
    assert weight.scale is not None
    found: set[int] = set()
    for data in files.chunks(weight.scale):
        found |= {byte for byte in range(1, NAN) if byte not in found and byte in data}
    return frozenset(found)


@lru_cache(maxsize=1024)
def unrepresentable(ratio: Fraction) -> frozenset[int] | None:
    """E4M3 bytes whose value times `ratio` is not an E4M3 value; None means all: the ratio has too
    many bits.
    """
    if max(_odd_part(ratio.numerator), _odd_part(ratio.denominator)) > 15:
        return None
    values = {Fraction(e4m3_value(byte)) for byte in range(1, NAN)}
    lost = frozenset(
        byte for byte in range(1, NAN) if Fraction(e4m3_value(byte)) * ratio not in values
    )
    return None if len(lost) == NAN - 1 else lost


def _odd_part(number: int) -> int:
    return number // (number & -number)
