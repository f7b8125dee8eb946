"""Records the inputs of the products of one decoder layer, and feeds them to the layer again.

The last bit of BF16 decides which FP4 code an input near a midpoint gets, so the outputs of two
correct layers can differ much. If both sides get the reference's inputs at each product, both round
to the same codes, and a comparison covers only the computation between two products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nibble.engine.contract.reference import InsidePoint, inside_noise
from nibble.engine.plugin.report.inside import row_errors, rows_in

# Names of parts of a layer that combine tokens contain one of these.
MIXES_TOKENS = ("attn", "attention", "mixer", "mamba", "conv")


@dataclass
class Point:
    """A tensor that is the input of one or more modules.

    names: the modules; value: BF16 [rows, width]; noise: relative error from rounding to BF16.
    """

    names: list[str]
    value: Tensor
    live: Tensor | None  # a reference, so that its address is not reused within the pass
    noise: float = 0.0


class Inside:
    """The points of one layer.

    count: tokens of the pass; sampled: the rows that are kept; is_here: whether a call belongs to
    the pass that is recorded.
    """

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
        point = next((point for point in self._points if point.names[0] == name), None)
        if point is None:
            return
        rows = slice(None) if len(point.value) == self._count else self._sampled.to(x.device)
        recorded = point.value.to(x.device, x.dtype)
        point.noise = float(row_errors(x[rows], recorded).median())
        x[rows] = recorded

    def finish(self) -> None:
        """End the recording, and keep only the sampled rows of points after the mixing of tokens.

        Points before it keep all rows, because each row affects all later tokens.
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
        """A context in which modules get the recorded inputs.

        The error of the input that they would have got becomes the point's noise.
        """
        self._feeds = True
        try:
            yield
        finally:
            self._feeds = False

    def tensors(self, place: int) -> dict[str, Tensor]:
        """The recorded inputs of the layer at `place`, and the noise of each, by contract keys."""
        values = {
            InsidePoint(place, number, point.names).key: point.value
            for number, point in enumerate(self._points)
        }
        noise = torch.tensor([point.noise for point in self._points])
        return {**values, inside_noise(place): noise}


def is_point(name: str, module: nn.Module) -> bool:
    """Whether to record the input of a module of a layer.

    True for matrix products, and for direct children of the layer that have children, such as a
    mixture of experts.
    """
    if not name or ".experts." in name:
        return False
    weight = getattr(module, "weight", None)
    is_product = (
        isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)
    )
    return is_product or ("." not in name and any(True for _ in module.children()))
