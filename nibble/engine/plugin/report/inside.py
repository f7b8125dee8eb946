"""Compares the inputs of the products in a model's layers with a computed reference, and replaces
them by the reference's (recorded by nibble/reference/inside.py).

With the reference's inputs, a kernel for FP4 activations rounds values near a midpoint to the same
codes as the reference. Each input is compared before it is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nibble.engine.contract.reference import InsidePoint, inside_noise
from nibble.engine.contract.report import Halves, PointComparison


class Inside:
    """The reference's points in a model.

    `fed` is a context for one pass over `tokens` tokens. `found` then has, for each layer, one
    comparison per point in the order of computation.
    """

    def __init__(
        self, model: nn.Module, layers: list[nn.Module], reference: dict[str, Tensor], tokens: int
    ) -> None:
        self._kept = reference["tokens"] < tokens
        self._sampled = reference["tokens"][self._kept]
        self._whole, self._tokens = len(reference["ids"]), tokens
        self.found: list[list[PointComparison]] = [[] for _ in layers]
        self._hooks: list[tuple[nn.Module, Callable[..., None]]] = []
        self._expected = 0
        joined = joined_names(model)
        for key, value in reference.items():
            if (point := InsidePoint.from_key(key)) is None:
                continue
            self._expected += 1
            named = module_of(layers[point.layer], point.names, joined)
            if named is not None:
                name, module = named
                noise = float(reference[inside_noise(point.layer)][point.number])
                self._hooks.append((module, self._hook(point.layer, name, value, noise)))

    @property
    def is_complete(self) -> bool:
        """Whether each point was compared once. The noise that the reference measured with all
        points fed is then valid for this pass.
        """
        compared = [entry["at"] for layer in self.found for entry in layer]
        once = all(len({entry["at"] for entry in layer}) == len(layer) for layer in self.found)
        return once and len(compared) == self._expected

    @contextmanager
    def fed(self) -> Iterator[None]:
        """A context in which products get the reference's inputs."""
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
            expected = value[: self._tokens] if is_whole else value[self._kept]
            sampled = expected[self._sampled] if is_whole else expected
            errors = row_errors(x[self._sampled.to(x.device)].cpu(), sampled).nan_to_num(
                nan=math.inf, posinf=math.inf
            )
            self.found[place].append({"at": name, **halves(errors), "noise": round(noise, 5)})
            rows = slice(None) if is_whole else self._sampled.to(x.device)
            x[rows] = expected.to(x.device, x.dtype)

        return hook


def joined_names(model: nn.Module) -> dict[str, str]:
    """Names of products that vLLM fuses -> name of the fused one, such as q_proj -> qkv_proj."""
    mapping = getattr(model, "packed_modules_mapping", None) or {}
    return {part: whole for whole, parts in mapping.items() for part in parts}


def module_of(
    layer: nn.Module, names: list[str], joined: dict[str, str]
) -> tuple[str, nn.Module] | None:
    """(name, module) for the first of the names that the layer has, alone or fused."""
    modules = dict(layer.named_modules())
    for name in names:
        before, dot, last = name.rpartition(".")
        for candidate in (name, before + dot + joined.get(last, last)):
            if candidate in modules:
                return candidate, modules[candidate]
    return None


def rows_in(args: Any, kwargs: Any, count: int) -> Tensor | None:
    """A view [count, width] of the first floating-point tensor of a call; None if it does not have
    `count` rows.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
            fits = value.numel() == count * value.shape[-1] and value.is_contiguous()
            return value.view(count, -1) if fits else None
    return None


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """|actual - expected| / |expected| of each row."""
    norms = expected.float().norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return (actual.float() - expected.float()).norm(dim=-1) / norms


def halves(errors: Tensor) -> Halves:
    """The medians of the first and of the second half of the tokens."""
    half = len(errors) // 2
    medians: Halves = {}
    if half:
        medians["early"] = round(float(errors[:half].median()), 5)
    if half < len(errors):
        medians["late"] = round(float(errors[half:].median()), 5)
    return medians
