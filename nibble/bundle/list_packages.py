"""Prints name, version and licence of each Python package, one a line. It runs inside the image."""

from __future__ import annotations

from importlib.metadata import Distribution, distributions

CLASSIFIER = "License ::"


def licence(package: Distribution) -> str:
    """The licence as the package states it: an SPDX expression, classifiers or a first line."""
    metadata = package.metadata
    classifiers = [text for text in metadata.get_all("Classifier") or () if CLASSIFIER in text]
    named = ", ".join(text.rpartition("::")[2].strip() for text in classifiers)
    (expression, *_), (first, *_) = (
        metadata.get_all(name) or [""] for name in ("License-Expression", "License")
    )
    text = expression or named or first
    return (text.strip().splitlines() or ["not stated"])[0][:100]


if __name__ == "__main__":
    rows = {(one.metadata["Name"], one.version, licence(one)) for one in distributions()}
    for row in sorted(rows, key=lambda row: str(row[0]).lower()):
        print(*row, sep="\t")
