"""The canary: checks what the server computes and answers before it admits clients.

Six mechanisms, in ten seconds together: `layers` (each worker's comparison with reference.py),
`computed` (layers and log-probs as transformers computes them from the checkpoint), `references`
(log-probs of fixed prompts as recorded), `consistency` (what it generates, scored again in one
piece), `drafts` (speculative decoding) and, where there is no reference, `coherence`.
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
    """Every mechanism that applies. `reports` are the workers', `computed` is a computed reference.

    `floor` is the share of drafts that has to be accepted.

    Without an `asker`, as for a model that generates nothing, the layers alone.
    """
    layers = _timed("layers", lambda: check_layers(reports))
    if asker is None:
        return [layers]
    checks: dict[str, Callable[[], Finding]] = {}
    if drafts:  # reads counters that other requests move
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
        found = check()
    except Broken as what:
        found = Finding(mechanism, "failed", str(what))
    except NotCompared as why:
        found = Finding(mechanism, "not compared", str(why))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        what = f"an answer does not have vLLM 0.32's shape ({type(error).__name__}: {error})"
        found = Finding(mechanism, "not compared", what)
    return found.taking(time.monotonic() - began)
