"""Joins the Prometheus texts of several engines into one. Pure.

The text format wants all samples of a metric in one group, below one HELP and TYPE.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(\{.*\})?( .+)")
_SUFFIXES = ("_bucket", "_count", "_sum", "_total", "_created", "_info")


def merge(texts: Mapping[str, str]) -> str:
    """One text; each sample has the label `engine_model` with its key of `texts`."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for engine, text in texts.items():
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if not any(line[:7] == one[:7] for one in known):
                    known.append(line)
            elif found := _SAMPLE.fullmatch(line):
                family = _family(found[1], heads)
                samples.setdefault(family, []).append(_labelled(found, engine))
    lines = []
    for family, values in samples.items():
        lines += [*heads.get(family, ()), *values]
    return "\n".join(lines) + "\n"


def _family(name: str, heads: Mapping[str, object]) -> str:
    if name in heads:
        return name
    for suffix in _SUFFIXES:
        if name.endswith(suffix) and name.removesuffix(suffix) in heads:
            return name.removesuffix(suffix)
    return name


def _labelled(sample: re.Match[str], engine: str) -> str:
    escaped = engine.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    label = f'engine_model="{escaped}"'
    labels = f"{{{label}}}" if sample[2] in (None, "{}") else f"{{{label},{sample[2][1:]}"
    return f"{sample[1]}{labels}{sample[3]}"
