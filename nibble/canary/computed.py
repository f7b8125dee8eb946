"""Judges the workers' comparisons with a computed reference: embedding, layers, logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nibble.canary.client import Asker
from nibble.canary.finding import Finding
from nibble.canary.references import Case, References, check_references

MECHANISM = "computed"
# Nats, mean over a text's tokens: a server rounds to BF16, and FP4 activations near the middle of
# two values fall either way.
MEAN_LIMITS = {"bf16": 0.25, "fp4": 0.9}
OTHER_NUMBERS_LIMIT, LOOSER = 0.9, 3.0  # where flags change numbers
EMBEDDING_LIMIT = 0.02  # BF16 rounds by 0.002
# Of what a layer adds: a part that any BF16 explains, and one in proportion to what rounding
# products to BF16 does to the reference's own layer (`noise`: 0.07 to 0.09 in the demos' W4A4
# layers, where FP4 codes near a midpoint fall either way). Beyond the first part, healthy layers
# were up to 1.5 times their noise off and 0.9 times on average over a model
# (benchmarks/results/reference_faults_cpu.json). One layer has a wide limit, since models differ; a
# fault of all layers, such as another activation function, shows in their average.
LAYER_LIMIT, LAYER_NOISES, ALL_LAYERS_NOISES, WARNING_NOISES = 0.02, 3.0, 1.6, 2.0
FP8_CACHE_LIMIT = 0.12  # as the comparison of attention with random inputs has it (docs/canary.md)
FACTOR_LIMIT, FACTOR_NOISES = 0.02, 0.4
LOGITS_LIMIT = 0.08
LOGIT_LIMIT, LOGIT_SPREADS = (
    0.5,
    8.0,
)  # nats that one token's logit may be off, at least and in spreads of all tokens'


def judge_definition(reports: Iterable[Mapping[str, Any]], looser: float = 1.0) -> Finding:
    """`looser`: a factor for limits of layers and logits, where flags change numbers."""
    given = [report["definition"] for report in reports if report.get("definition")]
    if not given:
        return Finding(MECHANISM, "not compared", "no worker had a reference")
    left = [one["not_compared"] for one in given if "not_compared" in one]
    if left:
        return Finding(MECHANISM, "not compared", left[0])
    for one in given:
        if problem := _problem(one, looser):
            return Finding(MECHANISM, "failed", problem)
    layers = [(place, entry) for one in given for place, entry in enumerate(one["layers"])]
    worst = max(_error(one) for _, entry in layers for one in (entry, *entry["inside"]))
    detail = (
        f"{len(layers)} layers on {given[0]['tokens']} tokens, at most {worst:.2g} from the"
        " computed reference"
    )
    return Finding(MECHANISM, "passed", detail, _far(layers, looser))


def _far(layers: Sequence[tuple[int, Mapping[str, Any]]], looser: float) -> str:
    """Layers that passed and are farther off than any healthy one has been."""
    far = [place for place, entry in layers if _noises(entry) > WARNING_NOISES * looser]
    if not far:
        return ""
    return (
        f"layer {', '.join(map(str, far))} is farther from the reference than rounding"
        " explains:"
        f" {max(_error(entry) for place, entry in layers if place in far):.2g}"
    )


def _error(entry: Mapping[str, Any]) -> float:
    """Of what a layer adds, or of what reaches one product."""
    return max(entry["early"], entry["late"])


def _noises(entry: Mapping[str, Any]) -> float:
    """By how many times its own rounding a layer is off, beyond what any BF16 explains."""
    return max(0.0, _error(entry) - LAYER_LIMIT) / max(entry["noise"], 1e-6)


def _problem(one: Mapping[str, Any], looser: float) -> str:
    if one["norms"]["wrong"]:
        return f"{one['norms']['wrong'][0]} is not what the checkpoint has under that name"
    if not one["embedding"] <= EMBEDDING_LIMIT:
        return (
            f"the embedding is off by {one['embedding']:.2g}, at most {EMBEDDING_LIMIT} is rounding"
        )
    for place, entry in enumerate(one["layers"]):
        if problem := _inside_problem(entry, one["cache"], looser) or _layer_problem(entry, looser):
            return f"layer {place} is the first wrong one: {problem}"
    noises = [_noises(entry) for entry in one["layers"]]
    if noises and not sum(noises) / len(noises) <= ALL_LAYERS_NOISES * looser:
        return (
            f"all {len(noises)} layers are off, on average by {sum(noises) / len(noises):.1f} times"
            f" what rounding does to them, at most {ALL_LAYERS_NOISES * looser:.1f}"
        )
    logits = one["logits"]
    if logits is None:
        return ""
    if not abs(logits["factor"] - 1) <= FACTOR_LIMIT * looser:
        return f"the logits are {logits['factor']:.3f} times as large as they should be"
    if not logits["error"] <= LOGITS_LIMIT * looser:
        return (
            f"the logits are off by {logits['error']:.2g}, at most {LOGITS_LIMIT * looser:.2g} is"
            " rounding"
        )
    if not abs(logits["off"]) <= max(LOGIT_LIMIT, LOGIT_SPREADS * logits["spread"]):
        return (
            f"the logit of token {logits['token']} is off by {logits['off']:+.2f} wherever it is"
            " computed"
        )
    return ""


def _inside_problem(entry: Mapping[str, Any], cache: str, looser: float) -> str:
    """What reaches a product, with what reached the products before it as the reference has it."""
    for point in entry["inside"]:
        explained = FP8_CACHE_LIMIT if cache == "fp8" and "attn" in point["at"] else LAYER_LIMIT
        limit = (explained + LAYER_NOISES * point["noise"]) * looser
        if not _error(point) <= limit:
            return (
                f"what reaches {point['at']} is off by {_error(point):.2g}, at most {limit:.2g} is"
                " rounding"
            )
    return ""


def _layer_problem(entry: Mapping[str, Any], looser: float) -> str:
    error = _error(entry)
    limit = (LAYER_LIMIT + LAYER_NOISES * entry["noise"]) * looser
    if not error <= limit:  # NaN is not
        output = f"norm of its output {entry['norm']:.4g}"
        return (
            f"what it adds to the stream is off by {error:.2g}, at most {limit:.2g} is rounding"
            f" ({output})"
        )
    if not abs(entry["factor"] - 1) <= (FACTOR_LIMIT + FACTOR_NOISES * entry["noise"]) * looser:
        return f"what it adds to the stream is {entry['factor']:.3f} times as large as it should be"
    return ""


def references_from(
    data: Mapping[str, Any], where: str, as_tokens: bool, differs: bool
) -> References:
    """The texts of a computed reference. `as_tokens`: they are sent as tokens; `differs`: flags
    change the server's numbers.
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
    return References(cases, where, (kind,), mean_limit=limit, looser=LOOSER if differs else 1.0)


def check_computed(
    asker: Asker, reports: Iterable[Mapping[str, Any]], references: References
) -> Finding:
    """What the workers' layers say, and the log-probs of all texts; the first of them that is
    wrong.
    """
    layers = judge_definition(reports, references.looser)
    if layers.verdict == "failed":
        return layers
    texts = check_references(asker, references)
    if texts.verdict == "failed":
        unknown = (
            f"; which layer is unknown: {layers.detail}" if layers.verdict == "not compared" else ""
        )
        return Finding(MECHANISM, "failed", texts.detail + unknown)
    return Finding(MECHANISM, texts.verdict, f"{layers.detail}; {texts.detail}", layers.warning)
