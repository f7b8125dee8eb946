"""How nibble hands a computed reference to the plugin: its files and the names of their tensors."""

from __future__ import annotations

from typing import Literal, NamedTuple

# --- files of REPORT_FOLDER -----------------------------------------------------------------------

REFERENCES = "references.json"  # maps a Format to the file with its tensors
REFERENCES_PENDING = "references.pending"  # while it exists, workers wait for REFERENCES

Format = Literal["fp4", "bf16"]  # of the activations that a computed reference is made for

# --- tensors of a computed reference --------------------------------------------------------------

INSIDE, NORM, NOISE = "inside", "norm", "noise"


class InsidePoint(NamedTuple):
    """A tensor `inside:LAYER:NUMBER:NAME,NAME`: the input of the modules NAME of a layer."""

    layer: int
    number: int
    names: list[str]

    @property
    def key(self) -> str:
        return f"{INSIDE}:{self.layer}:{self.number}:{','.join(self.names)}"

    @classmethod
    def from_key(cls, key: str) -> InsidePoint | None:
        """None for a tensor of another kind."""
        kind, _, rest = key.partition(":")
        if kind != INSIDE or rest.endswith(f":{NOISE}"):
            return None
        layer, number, names = rest.split(":")
        return cls(int(layer), int(number), names.split(","))


def inside_noise(layer: int) -> str:
    """The key of the reference's rounding errors at a layer's points, by their number."""
    return f"{INSIDE}:{layer}:{NOISE}"


def norm_key(name: str) -> str:
    """The key of a norm's weight."""
    return f"{NORM}:{name}"


def norm_name(key: str) -> str:
    """The norm whose weight the tensor is; empty for a tensor of another kind."""
    kind, _, name = key.partition(":")
    return name if kind == NORM else ""
