"""Checks the workers' comparisons of their quantized layers with reference.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nibble.canary.finding import Finding
from nibble.engine.contract.report import formats_of


def activations_of(reports: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The formats of activations in the correct NVFP4 layers: `fp4`, or `bf16` in weight-only
    kernels. Sorted.
    """
    formats = {name for report in reports for name in formats_of(report["checks"])}
    return tuple(sorted(formats - {"plain"}))


def on_node(node: str) -> str:
    """A prefix for messages about another node; empty for this node."""
    return f"node {node}: " if node else ""


def check_layers(reports: Iterable[Mapping[str, Any]]) -> Finding:
    """Fails if a layer of any worker is wrong; not compared if no layer has a reference.

    reports: contract.report.WorkerReport, with `node` for workers of other nodes.
    """
    entries = [
        (f"{on_node(report.get('node', ''))}rank {report['rank']}", entry)
        for report in reports
        for entry in report["checks"]
    ]
    wrong = [f"{worker}, {text}" for worker, entry in entries for text in entry["wrong_layers"]]
    if wrong:
        count = sum(entry["wrong"] for _, entry in entries)
        return Finding(
            "layers",
            "failed",
            f"{count} layer(s) do not compute what their weights define; {wrong[0]}",
        )
    compared = [entry for _, entry in entries if entry["compared"]]
    left = sorted(
        {
            f"{entry['kind'].split()[0]} ({entry['not_compared'][0]})"
            for _, entry in entries
            if entry["not_compared"]
        }
    )
    rest = f"; not compared: {', '.join(left)}" if left else ""
    if not compared:
        return Finding("layers", "not compared", f"no layer has a reference{rest}")
    worst = max(float(entry["worst_error"]) for entry in compared)
    layers = sum(entry["compared"] for entry in compared)
    return Finding(
        "layers",
        "passed",
        f"{layers} layers of {len(compared)} kinds, at most {worst:.2g} from reference.py{rest}",
    )
