"""The products within a model's layers, fed with a computed reference's inputs
(nibble.reference.inside keeps them).

A kernel for FP4 activations rounds the reference's own values, so that codes near a midpoint fall
as the reference's did; what reaches a product is compared before it is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nibble.engine.contract import Halves, InsidePoint, PointComparison, inside_noise


class Inside:
    """`fed` puts it into one pass over `tokens` tokens; `found`: for each layer, entries in the
    order of its points.

    `is_complete`: each point was met once, so that the noise that the reference measured with all
    of them fed is this pass's.
    """

    def __init__(
        self, model: nn.Module, layers: list[nn.Module], reference: dict[str, Tensor], tokens: int
    ) -> None:
        self._kept = reference["tokens"] < tokens
        self._sampled = reference["tokens"][self._kept]
        self._whole, self._tokens = len(reference["ids"]), tokens
        self.found: list[list[PointComparison]] = [[] for _ in layers]
        self._hooks: list[tuple[nn.Module, Callable[..., None]]] = []
        self._wanted = 0
        joined = joined_names(model)
        for key, value in reference.items():
            if (point := InsidePoint.from_key(key)) is None:
                continue
            self._wanted += 1
            found = module_of(layers[point.layer], point.names, joined)
            if found is not None:
                noise = float(reference[inside_noise(point.layer)][point.number])
                self._hooks.append((found[1], self._hook(point.layer, found[0], value, noise)))

    @property
    def is_complete(self) -> bool:
        met = [entry["at"] for layer in self.found for entry in layer]
        once = all(len({entry["at"] for entry in layer}) == len(layer) for layer in self.found)
        return once and len(met) == self._wanted

    @contextmanager
    def fed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module, hook in self._hooks:
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _hook(self, place: int, name: str, value: Tensor, noise: float) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            x = rows_in(args, kwargs, self._tokens)
            if x is None or x.shape[1] != value.shape[1]:
                return
            is_whole = len(value) == self._whole
            right = value[: self._tokens] if is_whole else value[self._kept]
            sampled = right[self._sampled] if is_whole else right
            errors = row_errors(x[self._sampled.to(x.device)].cpu(), sampled).nan_to_num(
                nan=math.inf, posinf=math.inf
            )
            self.found[place].append({"at": name, **halves(errors), "noise": round(noise, 5)})
            x[slice(None) if is_whole else self._sampled.to(x.device)] = right.to(x.device, x.dtype)

        return hook


def joined_names(model: nn.Module) -> dict[str, str]:
    """Names of products that vLLM computes as one: q_proj to qkv_proj."""
    mapping = getattr(model, "packed_modules_mapping", None) or {}
    return {part: whole for whole, parts in mapping.items() for part in parts}


def module_of(
    layer: nn.Module, names: list[str], joined: dict[str, str]
) -> tuple[str, nn.Module] | None:
    """The first of the names that the layer has, by itself or joined with others."""
    own = dict(layer.named_modules())
    for name in names:
        before, dot, last = name.rpartition(".")
        for candidate in (name, before + dot + joined.get(last, last)):
            if candidate in own:
                return candidate, own[candidate]
    return None


def rows_in(args: Any, kwargs: Any, count: int) -> Tensor | None:
    """The first floating tensor of a call as a view [count, width]; None where it has not
    `count` rows.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
            fits = value.numel() == count * value.shape[-1] and value.is_contiguous()
            return value.view(count, -1) if fits else None
    return None


def row_errors(found: Tensor, right: Tensor) -> Tensor:
    """|found - right| / |right| of each row."""
    norms = right.float().norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return (found.float() - right.float()).norm(dim=-1) / norms


def halves(errors: Tensor) -> Halves:
    """Medians of the first and second half of the tokens."""
    half = len(errors) // 2
    found: Halves = {}
    if half:
        found["early"] = round(float(errors[:half].median()), 5)
    if half < len(errors):
        found["late"] = round(float(errors[half:].median()), 5)
    return found
