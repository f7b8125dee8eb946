"""Checks the workers' comparisons with a computed reference: embedding, layers, logits.

`nibble reference` computes the reference with transformers (nibble/reference). Each worker feeds
the reference's inputs to its layers and reports relative errors
(nibble/engine/plugin/report/definition.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nibble.canary.client import Asker
from nibble.canary.finding import Finding
from nibble.canary.references import Case, References, check_references

MECHANISM = "computed"
# Nats, mean over a text's tokens. A server rounds to BF16, and that rounding decides which FP4 code
# an activation near the midpoint of two codes gets.
MEAN_LIMITS = {"bf16": 0.25, "fp4": 0.9}
# With flags that change the numbers: nats as above, and a factor for the limits below.
OTHER_NUMBERS_LIMIT, OTHER_NUMBERS_FACTOR = 0.9, 3.0
EMBEDDING_LIMIT = 0.02  # BF16 rounding explains 0.002
# Limits of the relative error of what a layer adds to the residual stream: a constant part, which
# BF16 explains, and a multiple of the layer's `noise`. The noise is the change of the reference's
# layer when its products are rounded to BF16: 0.07 to 0.09 in the W4A4 layers of the demo models,
# where rounding changes FP4 codes. Beyond the constant part, correct layers differed by up to 1.5
# times their noise, and by 0.9 times on average over a model
# (benchmarks/results/reference_faults_cpu.json). The limit for one layer is wide, because models
# differ; a fault of all layers, such as a wrong activation function, shows in the average.
LAYER_LIMIT, LAYER_NOISES, ALL_LAYERS_NOISES, WARNING_NOISES = 0.02, 3.0, 1.6, 2.0
FP8_CACHE_LIMIT = 0.12  # the limit of the comparison of attention, see docs/canary.md
FACTOR_LIMIT, FACTOR_NOISES = 0.02, 0.4
LOGITS_LIMIT = 0.08
# How far one token's logit may be off: in nats, or as a multiple of the spread over all tokens.
LOGIT_LIMIT, LOGIT_SPREADS = 0.5, 8.0


def judge_definition(reports: Iterable[Mapping[str, Any]], limit_factor: float = 1.0) -> Finding:
    """The first wrong layer of any worker, or how close the layers are.

    reports: contract.report.WorkerReport. limit_factor: multiplies the limits of layers and logits.
    """
    comparisons = [report["definition"] for report in reports if report.get("definition")]
    if not comparisons:
        return Finding(MECHANISM, "not compared", "no worker had a reference")
    reasons = [each["not_compared"] for each in comparisons if "not_compared" in each]
    if reasons:
        return Finding(MECHANISM, "not compared", reasons[0])
    for comparison in comparisons:
        if problem := _problem(comparison, limit_factor):
            return Finding(MECHANISM, "failed", problem)
    layers = [(place, layer) for each in comparisons for place, layer in enumerate(each["layers"])]
    worst = max(_error(entry) for _, layer in layers for entry in (layer, *layer["inside"]))
    detail = (
        f"{len(layers)} layers on {comparisons[0]['tokens']} tokens, at most {worst:.2g} from the"
        " computed reference"
    )
    return Finding(MECHANISM, "passed", detail, _warning(layers, limit_factor))


def _warning(layers: Sequence[tuple[int, Mapping[str, Any]]], limit_factor: float) -> str:
    """Layers that are within the limits and differ more than any correct layer measured so far."""
    far = [place for place, layer in layers if _noises(layer) > WARNING_NOISES * limit_factor]
    if not far:
        return ""
    worst = max(_error(layer) for place, layer in layers if place in far)
    return (
        f"layer {', '.join(map(str, far))} is farther from the reference than rounding"
        f" explains: {worst:.2g}"
    )


def _error(entry: Mapping[str, Any]) -> float:
    """The relative error of a LayerComparison or PointComparison (contract.report)."""
    return max(entry["early"], entry["late"])


def _noises(entry: Mapping[str, Any]) -> float:
    """A layer's error beyond LAYER_LIMIT, as a multiple of its noise."""
    return max(0.0, _error(entry) - LAYER_LIMIT) / max(entry["noise"], 1e-6)


def _problem(comparison: Mapping[str, Any], limit_factor: float) -> str:
    """The first thing that is wrong in a contract.report.Comparison, in computation order."""
    if comparison["norms"]["wrong"]:
        return f"{comparison['norms']['wrong'][0]} is not what the checkpoint has under that name"
    embedding = comparison["embedding"]
    if not embedding <= EMBEDDING_LIMIT:  # also true for NaN, as in each comparison below
        return f"the embedding is off by {embedding:.2g}, at most {EMBEDDING_LIMIT} is rounding"
    for place, layer in enumerate(comparison["layers"]):
        inside = _inside_problem(layer, comparison["cache"], limit_factor)
        if problem := inside or _layer_problem(layer, limit_factor):
            return f"layer {place} is the first wrong one: {problem}"
    noises = [_noises(layer) for layer in comparison["layers"]]
    if noises and not sum(noises) / len(noises) <= ALL_LAYERS_NOISES * limit_factor:
        return (
            f"all {len(noises)} layers are off, on average by {sum(noises) / len(noises):.1f} times"
            f" what rounding does to them, at most {ALL_LAYERS_NOISES * limit_factor:.1f}"
        )
    return _logits_problem(comparison["logits"], limit_factor) if comparison["logits"] else ""


def _logits_problem(logits: Mapping[str, Any], limit_factor: float) -> str:
    if not abs(logits["factor"] - 1) <= FACTOR_LIMIT * limit_factor:
        return f"the logits are {logits['factor']:.3f} times as large as they should be"
    if not logits["error"] <= LOGITS_LIMIT * limit_factor:
        return (
            f"the logits are off by {logits['error']:.2g}, at most"
            f" {LOGITS_LIMIT * limit_factor:.2g} is rounding"
        )
    if not abs(logits["off"]) <= max(LOGIT_LIMIT, LOGIT_SPREADS * logits["spread"]):
        return (
            f"the logit of token {logits['token']} is off by {logits['off']:+.2f} wherever it is"
            " computed"
        )
    return ""


def _inside_problem(layer: Mapping[str, Any], cache: str, limit_factor: float) -> str:
    """The first product of a layer whose input is wrong.

    The worker replaces each product's input by the reference's, so errors do not add up.
    """
    for point in layer["inside"]:
        explained = FP8_CACHE_LIMIT if cache == "fp8" and "attn" in point["at"] else LAYER_LIMIT
        limit = (explained + LAYER_NOISES * point["noise"]) * limit_factor
        if not _error(point) <= limit:
            return (
                f"what reaches {point['at']} is off by {_error(point):.2g}, at most {limit:.2g} is"
                " rounding"
            )
    return ""


def _layer_problem(layer: Mapping[str, Any], limit_factor: float) -> str:
    error = _error(layer)
    limit = (LAYER_LIMIT + LAYER_NOISES * layer["noise"]) * limit_factor
    if not error <= limit:
        output = f"norm of its output {layer['norm']:.4g}"
        return (
            f"what it adds to the stream is off by {error:.2g}, at most {limit:.2g} is rounding"
            f" ({output})"
        )
    factor_limit = (FACTOR_LIMIT + FACTOR_NOISES * layer["noise"]) * limit_factor
    if not abs(layer["factor"] - 1) <= factor_limit:
        return f"what it adds to the stream is {layer['factor']:.3f} times as large as it should be"
    return ""


def references_from(
    data: Mapping[str, Any], where: str, as_tokens: bool, differs: bool
) -> References:
    """The texts of a computed reference (`data`, read from the file `where`).

    as_tokens: send prompts as token ids; differs: flags change the server's numbers.
    """
    kind = data["activations"]
    cases = tuple(
        Case(
            list(case["prompt_ids"]) if as_tokens else case["prompt"],
            tuple(case["prompt_ids"]),
            case["answer"],
            tuple(case["answer_ids"]),
            tuple(case["logprobs"]),
        )
        for case in data["cases"]
    )
    limit = max(MEAN_LIMITS[kind], OTHER_NUMBERS_LIMIT if differs else 0.0)
    factor = OTHER_NUMBERS_FACTOR if differs else 1.0
    return References(cases, where, (kind,), mean_limit=limit, limit_factor=factor)


def check_computed(
    asker: Asker, reports: Iterable[Mapping[str, Any]], references: References
) -> Finding:
    """Check the workers' layers first, then the log-probs of all texts."""
    layers = judge_definition(reports, references.limit_factor)
    if layers.verdict == "failed":
        return layers
    texts = check_references(asker, references)
    if texts.verdict == "failed":
        unknown = (
            f"; which layer is unknown: {layers.detail}" if layers.verdict == "not compared" else ""
        )
        return Finding(MECHANISM, "failed", texts.detail + unknown)
    return Finding(MECHANISM, texts.verdict, f"{layers.detail}; {texts.detail}", layers.warning)
