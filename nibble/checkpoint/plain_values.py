"""Finds NaN and infinities in small unquantized tensors: norms, biases, routers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.nvfp4 import Problem, gather
from nibble.checkpoint.scale_values import TensorFiles
from nibble.checkpoint.weights import is_scale, kind_of

# The canary covers embeddings and heads: reading them would cost seconds of a start
SMALL_BYTES = 4 << 20
_LEAVES = (".weight", ".bias")  # masks, which may hold infinities, have other names
_WIDTHS = {"BF16": 2, "F16": 2, "F32": 4}


def check_plain_values(
    folder: Path, tensors: Iterable[TensorInfo], num_layers: int | None
) -> tuple[Problem, ...]:
    """The first of `tensors` in `folder` that holds NaN or infinity, and the number of others."""
    small = [tensor for tensor in tensors if _is_looked_at(tensor)]
    small.sort(key=lambda tensor: (tensor.file, tensor.offset))
    problems = []
    with TensorFiles(folder) as files:
        for tensor in small:
            place = first_not_finite(files.read(tensor, 0, tensor.nbytes), tensor.dtype)
            if place is not None:
                is_draft = kind_of(tensor.name, num_layers) == "draft"
                what = f"holds NaN or infinity at element {place}"
                problems.append(Problem.of("plain value", tensor, what, "finite numbers", is_draft))
    return gather(problems)


def _is_looked_at(tensor: TensorInfo) -> bool:
    is_small = tensor.dtype in _WIDTHS and 0 < tensor.nbytes <= SMALL_BYTES
    return is_small and tensor.name.endswith(_LEAVES) and not is_scale(tensor.name)


def first_not_finite(data: bytes, dtype: str) -> int | None:
    """The first element whose exponent is all ones; little-endian `dtype`."""
    width = _WIDTHS[dtype]
    first = data[width - 1 :: width]  # sign and most of the exponent
    if dtype == "F16":
        found = re.search(rb"[\x7c-\x7f\xfc-\xff]", first)
        return found.start() if found else None
    if (
        b"\x7f" not in first and b"\xff" not in first
    ):  # nearly always; five times as fast as the search
        return None
    second = data[width - 2 :: width]
    places = (match.start() for match in re.finditer(rb"[\x7f\xff]", first))
    return next((place for place in places if second[place] & 0x80), None)
