"""`nibble inspect`: what a checkpoint holds, and whether nibble and vLLM load it exactly."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nibble.checkpoint import Checkpoint, read_source
from nibble.checkpoint.cloverlm import is_cloverlm
from nibble.checkpoint.exclusions import correct, excluded
from nibble.checkpoint.fused_groups import FusedGroup, fused_groups
from nibble.checkpoint.nvfp4 import Problem
from nibble.checkpoint.plain_values import check_plain_values
from nibble.checkpoint.plausible import check_plausible
from nibble.checkpoint.scale_layout import LayoutCheck, check_layout
from nibble.checkpoint.scale_values import check_values, marlin_flushes, read_floats
from nibble.checkpoint.source import Source, open_source
from nibble.checkpoint.vllm_config import declared_config
from nibble.checkpoint.weights import is_scale, kind_of
from nibble.errors import ExitCode, NibbleError
from nibble.hub.packaged import PACKAGED, not_here
from nibble.machine.disk import gib
from nibble.plan.gather import Asked, hub_environ, local_model
from nibble.plan.nvfp4_options import is_tied
from nibble.plan.validate import check_checkpoint

SMALL_SCALE_BYTES = 2 << 30  # of block scales that are read without --deep


@dataclass(frozen=True)
class Inspection:
    """The result of `nibble inspect`; `to_json` gives it as plain data."""

    checkpoint: Checkpoint = field(repr=False)
    producer: str
    inventory: tuple[Mapping[str, Any], ...]
    kv_scales: int
    excluded: tuple[str, ...]
    wrong_modules: tuple[str, ...]
    corrected: tuple[str, ...] | None
    lm_head: str
    draft: str
    groups: tuple[FusedGroup, ...]
    layout: LayoutCheck | None
    scales_read: str
    vllm_alone: tuple[str, ...]
    problems: tuple[Problem, ...]
    doubts: tuple[str, ...]
    refusal: str
    exit_code: int

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        if self.refusal:
            return f"refused: {self.refusal}"
        if self.layout and self.layout.wrong:
            return (
                f"loads; {self.layout.wrong} of its weights may have their scales in another layout"
                f" ({self.scales_read})"
            )
        if self.checkpoint.missing:
            return f"seems to be incomplete ({self.scales_read})"
        if self.doubts:
            return f"loads, with unlikely scales ({self.scales_read})"
        if not self.checkpoint.scheme.is_nvfp4:
            is_quantized_later = self.checkpoint.scheme.vllm_quantization == "quartet2"
            later = ": its layers are quantized when it loads" if is_quantized_later else ""
            return f"loads; no layer is NVFP4{later}"
        return f"loads exactly ({self.scales_read})"

    def to_json(self) -> dict[str, Any]:
        """Plain data for --json."""
        checkpoint = self.checkpoint
        weights = checkpoint.weights
        return {
            "id": checkpoint.id,
            "revision": checkpoint.revision,
            "path": str(checkpoint.path or ""),
            "architecture": checkpoint.architecture,
            "model_type": checkpoint.model_type,
            "scheme": asdict(checkpoint.scheme),
            "producer": self.producer,
            "inventory": list(self.inventory),
            "bytes": weights.total_bytes if weights else None,
            "parameters": weights.parameters if weights else None,
            "nvfp4_weights": len(checkpoint.nvfp4),
            "kv_scales": self.kv_scales,
            "excluded": list(self.excluded),
            "wrong_modules": list(self.wrong_modules),
            "corrected": self.corrected,
            "lm_head": self.lm_head,
            "draft": self.draft,
            "fused_groups": [_group_json(group) for group in self.groups],
            "layout": {
                "tensors": self.layout.tensors,
                "right": self.layout.right,
                "wrong": self.layout.wrong,
            }
            if self.layout
            else None,
            "scales_read": self.scales_read,
            "vllm_alone": list(self.vllm_alone),
            "missing": list(checkpoint.missing),
            "doubts": list(self.doubts),
            "problems": [
                {**asdict(problem), "code": int(problem.code)} for problem in self.problems
            ],
            "verdict": self.verdict,
            "exit_code": self.exit_code,
        }


def _group_json(group: FusedGroup) -> dict[str, Any]:
    return {
        "name": group.name,
        "scales": list(group.scales),
        "is_expert": group.is_expert,
        "quality": group.quality,
        "gain_error_of_vllm": group.gain_error,
        "worst_part": group.worst_part,
    }


def inspect_model(asked: Asked, deep: bool) -> Inspection:
    """Inspect the requested model: a folder, an id in the cache, or one on the Hub. Raises USAGE
    without a model.
    """
    settings = asked.settings
    if settings.model is None:
        raise NibbleError(
            ExitCode.USAGE,
            what="`nibble inspect` needs a model",
            expected="a folder or an id",
            action="write `nibble inspect MODEL`",
        )
    folder = local_model(settings.model, asked.cache)
    if folder is None and (package := PACKAGED.get(settings.model)):
        raise not_here(package)
    model = str(folder or settings.model)
    source = open_source(model, settings.revision, hub_environ(asked))
    return inspect(source, read_source(source), deep)


def inspect(source: Source, checkpoint: Checkpoint, deep: bool = False) -> Inspection:
    """Inspect the checkpoint that was read from `source`.

    It reads headers and fp32 scales; in a folder also block scales, if they are less than 2 GiB or
    with `deep`.
    """
    nvfp4, folder = checkpoint.nvfp4, checkpoint.path
    scale_bytes = sum(weight.scale.nbytes for weight in nvfp4 if weight.scale)
    reads_all = folder is not None and bool(nvfp4) and (deep or scale_bytes <= SMALL_SCALE_BYTES)
    problems, layout, flushed = list(checkpoint.problems), None, 0
    doubts: tuple[str, ...] = ()
    if folder is not None:
        model_type = str(checkpoint.text_config.get("model_type") or checkpoint.model_type)
        plausible = check_plausible(
            folder, checkpoint.tensors, nvfp4, model_type, checkpoint.num_layers
        )
        problems, doubts = [*problems, *plausible.problems], plausible.doubts
    if reads_all and folder is not None:
        problems += check_values(folder, nvfp4).problems
        problems += check_plain_values(folder, checkpoint.tensors.values(), checkpoint.num_layers)
        layout = check_layout(folder, nvfp4, is_cloverlm(checkpoint))
        problems += [layout.problem] if layout.problem else []
        flushed = marlin_flushes(folder, nvfp4)
    values = read_floats(source, [weight.global_scale for weight in nvfp4 if weight.global_scale])
    groups = fused_groups(nvfp4, values or {}, folder if reads_all else None)
    found = correct(checkpoint.modules, True) if checkpoint.modules else None
    refusal = _refusal(checkpoint, problems)
    config = checkpoint.vllm_config.config if checkpoint.vllm_config else {}
    return Inspection(
        checkpoint=checkpoint,
        producer=_producer(checkpoint, config),
        inventory=tuple(_inventory(checkpoint)),
        kv_scales=sum(name.endswith((".k_scale", ".v_scale")) for name in checkpoint.tensors),
        excluded=tuple(excluded(config)),
        wrong_modules=found.wrong if found else (),
        corrected=tuple(excluded(found.config)) if found else None,
        lm_head=_lm_head(checkpoint),
        draft=_draft(checkpoint),
        groups=tuple(groups),
        layout=layout,
        scales_read=_scales_read(reads_all, scale_bytes, values is not None),
        vllm_alone=tuple(_vllm_alone(checkpoint, groups, found.wrong if found else (), flushed)),
        problems=tuple(problems),
        doubts=doubts,
        refusal=refusal.line() if refusal else "",
        exit_code=int(refusal.code) if refusal else 0,
    )


def _refusal(checkpoint: Checkpoint, problems: Iterable[Problem]) -> NibbleError | None:
    """Why `serve` would refuse the checkpoint on any machine; defects of drafts do not count."""
    try:
        check_checkpoint(checkpoint, {})
    except NibbleError as error:
        return error
    return next(
        (problem.error(checkpoint.where) for problem in problems if not problem.is_draft), None
    )


def _producer(checkpoint: Checkpoint, config: Mapping[str, Any]) -> str:
    producer = config.get("producer")
    if isinstance(producer, Mapping):
        return " ".join(str(producer[key]) for key in ("name", "version") if producer.get(key))
    if version := config.get("version"):
        return f"compressed-tensors {version}"
    return str(config.get("quant_method") or "") if checkpoint.vllm_config else ""


def _inventory(checkpoint: Checkpoint) -> Iterable[Mapping[str, Any]]:
    """Tensors by part of the model and type, the largest first; scales are a separate part."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: defaultdict[tuple[str, str], int] = defaultdict(int)
    for tensor in checkpoint.tensors.values():
        kind = "scales" if is_scale(tensor.name) else kind_of(tensor.name, checkpoint.num_layers)
        counts[kind, tensor.dtype] += 1
        sizes[kind, tensor.dtype] += tensor.nbytes
    for key in sorted(counts, key=lambda key: -sizes[key]):
        yield {"kind": key[0], "dtype": key[1], "tensors": counts[key], "bytes": sizes[key]}


def _lm_head(checkpoint: Checkpoint) -> str:
    stored = [t for name, t in checkpoint.tensors.items() if name.split(".")[-2:-1] == ["lm_head"]]
    weight = next((t for t in stored if t.name.endswith((".weight", ".weight_packed"))), None)
    if weight is None:
        return "tied to the embedding" if is_tied(checkpoint) else "none"
    nvfp4 = any(found.weight.name == weight.name for found in checkpoint.nvfp4)
    size = gib(sum(t.nbytes for t in stored))
    tied = ", tied to the embedding" if is_tied(checkpoint) else ""
    return f"{'NVFP4' if nvfp4 else weight.dtype}, {size}{tied}"


def _draft(checkpoint: Checkpoint) -> str:
    """Whether there are MTP layers, and how they are stored."""
    if not checkpoint.has_mtp or checkpoint.weights is None or not checkpoint.weights.draft_bytes:
        return "none"
    size = gib(checkpoint.weights.draft_bytes)
    if checkpoint.modules is None:
        return size
    quantized = checkpoint.modules.draft & checkpoint.modules.quantized
    plain = checkpoint.modules.draft & checkpoint.modules.plain
    return f"{size}, {len(quantized)} linear layers quantized, {len(plain)} not"


def _scales_read(reads_all: bool, scale_bytes: int, has_values: bool) -> str:
    if reads_all:
        return f"by its headers and all its scales, {gib(scale_bytes)}"
    if not has_values:
        return "by its headers; fp32 scales lie too far apart to read them from the Hub"
    return "by its headers and fp32 scales; --deep reads the block scales of a folder"


def _vllm_alone(
    checkpoint: Checkpoint, groups: Iterable[FusedGroup], wrong: tuple[str, ...], flushed: int
) -> Iterable[str]:
    """What pristine vLLM 0.32.0 would compute wrongly with this checkpoint, in words."""
    if not checkpoint.scheme.is_nvfp4:
        return
    yield from _merge_errors(groups)
    if checkpoint.vllm_config:
        yield from (_reason(text) for text in checkpoint.vllm_config.reasons)
    if wrong:
        more = f" and {len(wrong) - 1} more" if wrong[1:] else ""
        yield f"builds {wrong[0]}{more} as the config lists it, not as the file stores it"
    raw = declared_config(checkpoint.config, None)
    if raw is not None and "exclude_modules" in raw and raw["exclude_modules"] is None:
        yield "fails on `exclude_modules: null`"
    if flushed:
        yield f"with Marlin, loses the smallest block scales of {flushed} weights: they become 0"
    if checkpoint.scheme.vllm_quantization == "quartet2":
        yield "reads its tiled scales row by row, if at all"
    yield "has no NVFP4 kernel for the CPU"


def _merge_errors(groups: Iterable[FusedGroup]) -> Iterable[str]:
    for is_expert in (False, True):
        unequal = [g for g in groups if g.is_expert is is_expert and g.quality != "equal"]
        if not unequal:
            continue
        total = sum(group.is_expert is is_expert for group in groups)
        worst = max(unequal, key=lambda group: group.gain_error)
        what = (
            "experts: up with gate's scale"
            if is_expert
            else "fused layers: one part's scale for all"
        )
        yield (
            f"{len(unequal)} of {total} {what}, gain wrong by up to {worst.gain_error:.1%}"
            f" ({worst.worst_part})"
        )


def _reason(text: str) -> str:
    known = {
        "it is labelled W4A4 and has no activation scales": (
            "uses uninitialised memory as activation scales"
        ),
        "vLLM 0.32 does not read its hf_quant_config.json": (
            "ignores its hf_quant_config.json, or fails on it"
        ),
    }
    return known.get(text, text)
