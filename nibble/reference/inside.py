"""What goes into the products of one decoder layer, kept in a pass and fed to the layer again.

FP4 codes of inputs near a midpoint fall either way with the last bit of BF16, so that a layer's
output tells little. With the reference's own inputs at each product both sides round the same
codes, and what lies between two products is compared alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nibble.engine.contract import InsidePoint, inside_noise
from nibble.engine.plugin.report.inside import row_errors, rows_in

MIXES_TOKENS = ("attn", "attention", "mixer", "mamba", "conv")  # in the name of a layer's part


@dataclass
class Point:
    """A tensor that modules get: `names` of all that get it, `value` [rows, width] in BF16,
    `noise`: its own rounding.
    """

    names: list[str]
    value: Tensor
    live: Tensor | None  # keeps its address from being used again within the pass
    noise: float = 0.0


class Inside:
    """The points of one layer. `is_here` says whether a call belongs to the pass."""

    def __init__(
        self, layer: nn.Module, count: int, sampled: Tensor, is_here: Callable[[], bool]
    ) -> None:
        self._count, self._sampled, self._is_here = count, sampled, is_here
        self._points: list[Point] = []
        self._feeds = False
        self._is_kept = False
        for name, module in layer.named_modules():
            if is_point(name, module):
                module.register_forward_pre_hook(self._hook(name), with_kwargs=True)

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._is_here() or (x := rows_in(args, kwargs, self._count)) is None:
                return
            if self._feeds:
                self._feed(name, x)
            elif not self._is_kept:
                self._keep(name, x)

        return hook

    def _keep(self, name: str, x: Tensor) -> None:
        for point in self._points:
            if point.live is not None and point.live.data_ptr() == x.data_ptr():
                point.names.append(name)
                return
        self._points.append(Point([name], x.bfloat16().cpu(), x))

    def _feed(self, name: str, x: Tensor) -> None:
        point = next((one for one in self._points if one.names[0] == name), None)
        if point is None:
            return
        rows = slice(None) if len(point.value) == self._count else self._sampled.to(x.device)
        right = point.value.to(x.device, x.dtype)
        point.noise = float(row_errors(x[rows], right).median())
        x[rows] = right

    def finish(self) -> None:
        """The pass has left the layer: of what follows the mixing of tokens, the sampled rows
        are enough.
        """
        parts = [point.names[0].partition(".")[0] for point in self._points]
        for place, (part, point) in enumerate(zip(parts, self._points, strict=True)):
            before_mixing = part in parts[place + 1 :] and any(
                word in part for word in MIXES_TOKENS
            )
            point.value = point.value if before_mixing else point.value[self._sampled]
            point.live = None
        self._is_kept = True

    @contextmanager
    def fed(self) -> Iterator[None]:
        """Within it, modules get what was kept in place of what reaches them, whose error
        becomes the point's noise.
        """
        self._feeds = True
        try:
            yield
        finally:
            self._feeds = False

    def tensors(self, place: int) -> dict[str, Tensor]:
        """What goes into the products of the layer at `place`, and the noise of each."""
        found = {
            InsidePoint(place, number, one.names).key: one.value
            for number, one in enumerate(self._points)
        }
        return {**found, inside_noise(place): torch.tensor([one.noise for one in self._points])}


def is_point(name: str, module: nn.Module) -> bool:
    """Products, and the direct parts of a layer that have parts themselves, such as a mixture of
    experts.
    """
    if not name or ".experts." in name:
        return False
    weight = getattr(module, "weight", None)
    is_product = (
        isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)
    )
    return is_product or ("." not in name and any(True for _ in module.children()))
