"""Runs the mechanisms of the canary within their budget.

Six mechanisms share a budget of ten seconds:

- `layers`: each worker compares its quantized layers with reference.py.
- `computed`: layers and log-probs match those that transformers computes from the checkpoint.
- `references`: log-probs of fixed prompts match the recorded ones.
- `consistency`: generated tokens get the same log-probs when they are scored as a prompt.
- `drafts`: speculative decoding accepts drafts and does not change the text.
- `coherence`: the model answers simple questions. Runs only without a reference.

docs/canary.md says which faults each of them finds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nibble.canary.client import Asker
from nibble.canary.coherence import check_coherence
from nibble.canary.computed import check_computed
from nibble.canary.consistency import check_consistency
from nibble.canary.drafts import check_drafts
from nibble.canary.finding import Broken, Finding, NotCompared
from nibble.canary.layers import check_layers
from nibble.canary.references import References, check_references

__all__ = ["BUDGET_S", "Finding", "run_canary"]

BUDGET_S = 10.0


def run_canary(
    asker: Asker | None,
    reports: Iterable[Mapping[str, Any]],
    references: References | None = None,
    computed: References | None = None,
    *,
    tools: bool = False,
    drafts: bool = False,
    samples: bool = True,
    floor: float | None = None,
) -> list[Finding]:
    """Run every mechanism that applies and return one finding for each.

    asker: sends the requests. None for a model that generates no text: only `layers` runs.
    reports: the workers' reports (contract.report.WorkerReport).
    references: recorded answers; computed: a reference that `nibble reference` computed.
    tools: the model may call tools; drafts: speculative decoding is on.
    samples: also send requests that sample with top_k=1.
    floor: share of drafted tokens that the model has to accept, 0 to 1.
    """
    layers = _timed("layers", lambda: check_layers(reports))
    if asker is None:
        return [layers]
    checks: dict[str, Callable[[], Finding]] = {}
    if drafts:  # first: it reads counters, which the requests of other mechanisms change
        checks["drafts"] = lambda: check_drafts(asker, floor)
    checks["consistency"] = lambda: check_consistency(asker, samples)
    if references is not None:
        checks["references"] = lambda: check_references(asker, references)
    if computed is not None:
        checks["computed"] = lambda: check_computed(asker, reports, computed)
    elif references is None:
        checks["coherence"] = lambda: check_coherence(asker, tools)
    return [layers, *(_timed(name, check) for name, check in checks.items())]


def _timed(mechanism: str, check: Callable[[], Finding]) -> Finding:
    began = time.monotonic()
    try:
        finding = check()
    except Broken as broken:
        finding = Finding(mechanism, "failed", str(broken))
    except NotCompared as reason:
        finding = Finding(mechanism, "not compared", str(reason))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        detail = f"an answer does not have vLLM 0.32's shape ({type(error).__name__}: {error})"
        finding = Finding(mechanism, "not compared", detail)
    return finding.taking(time.monotonic() - began)
