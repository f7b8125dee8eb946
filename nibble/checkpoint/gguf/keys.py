"""The numbers and shapes of one GGUF model, by the names of its architecture."""

from __future__ import annotations

from typing import Any

from nibble.checkpoint.gguf.file import GgufFile
from nibble.errors import ExitCode, NibbleError


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The shape in Hugging Face's order: GGUF states the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


class Keys:
    """The numbers of one architecture; it notes which were asked for."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.prefix = f"{file.architecture}."

    def number(self, key: str, default: float | None = None) -> Any:
        """The number at `key`. Raises MODEL if it is absent, CONFIG if it is not one number."""
        value = self.file.metadata.get(self.prefix + key, default)
        if value is None:
            raise NibbleError(
                ExitCode.MODEL,
                what=f"{self.file.path} has no {self.prefix}{key}",
                action="convert another GGUF file of this model",
            )
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]  # one number for each layer
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refused(key, f"{self.prefix}{key} differs from layer to layer")
        if not value > 0:
            raise self.refused(key, f"{self.prefix}{key} is not above 0")
        return value

    def get(self, key: str) -> Any:
        """The value at `key` or None."""
        return self.file.metadata.get(self.prefix + key)

    def shape(self, name: str, dimensions: int = 2) -> tuple[int, ...]:
        """The shape of a tensor, as Hugging Face counts. Raises MODEL if it is absent or has other
        dimensions.
        """
        found = shape_of(self.file.tensors[name]) if name in self.file.tensors else None
        if found is None or len(found) != dimensions:
            what = f"no tensor {name}" if found is None else f"{name} of shape {list(found)}"
            raise NibbleError(
                ExitCode.MODEL,
                what=f"{self.file.path} has {what}",
                expected=f"the tensors of {self.file.architecture}",
                action="convert another GGUF file of this model",
            )
        return found

    def refused(self, key: str, what: str) -> NibbleError:
        """The error for a value that config.json cannot state."""
        return NibbleError(
            ExitCode.CONFIG,
            what=f"{self.file.path}: {what} ({self.prefix}{key} = {self.get(key)})",
            expected="what Hugging Face's class of this family computes",
            action="convert another model",
        )


def head_dim(keys: Keys) -> int:
    """The size of an attention head. Raises CONFIG where heads do not divide the queries."""
    (rows, _), heads = keys.shape("blk.0.attn_q.weight"), keys.number("attention.head_count")
    if rows % heads:
        raise keys.refused("attention.head_count", f"blk.0.attn_q.weight has {rows} rows")
    return rows // heads
