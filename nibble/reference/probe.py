"""One pass of a reference: inputs and products of each layer, its contribution, and logits.

The worker feeds the same values to vLLM's layers (nibble.engine.plugin.report.definition).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nibble.engine.plugin.report.inside import row_errors
from nibble.reference.inside import Inside
from nibble.reference.streaming import InBf16, StreamedModel

LOGIT_PLACES = 4  # of the text, whose logits are kept for the whole vocabulary
SAMPLED = 16  # tokens from the whole text, and as many from its last quarter


class Probe:
    """`run` is the pass; `tensors` is what it kept."""

    def __init__(
        self, model: StreamedModel, ids: tuple[int, ...], small: dict[str, Tensor]
    ) -> None:
        self.model, self.ids, self._small = model, ids, small
        self._inputs: list[Tensor] = []
        self._added: list[Tensor] = []
        self._norms: list[float] = []
        self._noise: list[tuple[float, float]] = []
        self._logits: Tensor | None = None
        self._here = threading.local()
        self._fits = True
        early = torch.linspace(0, len(ids) - 1, SAMPLED).long()
        late = torch.linspace(len(ids) * 3 // 4, len(ids) - 1, SAMPLED).long()
        self.tokens = torch.cat((early, late)).unique()
        self.places = torch.linspace(len(ids) // 2, len(ids) - 1, LOGIT_PLACES).long()
        self._inside = [
            Inside(layer, len(ids), self.tokens, self._is_here) for layer in model.layers
        ]
        for layer, inside in zip(model.layers, self._inside, strict=True):
            layer.register_forward_hook(self._after(inside), with_kwargs=True)

    def run(self) -> None:
        self._here.is_probe = True
        ids = torch.tensor([self.ids], device=self.model.device)
        self._logits = (
            self.model.module(input_ids=ids, use_cache=False).logits[0, self.places].float().cpu()
        )

    def _is_here(self) -> bool:
        """Other passes run the same modules in other threads."""
        return getattr(self._here, "is_probe", False)

    def _after(self, inside: Inside) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self._is_here():
                return
            before = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            after = output[0] if isinstance(output, tuple) else output
            if before.ndim != 3 or before.shape != after.shape:
                self._fits = False  # streams of another form, as Gemma 3n's
                return
            inside.finish()
            if not self._inputs:
                self._inputs.append(before[0].bfloat16().cpu())
            self._inputs.append(after[0].bfloat16().cpu())
            right = (after - before)[0, self.tokens].float().cpu()
            self._added.append(right)
            self._norms.append(float(after[0].norm(dim=-1).mean()))
            noise = self._rounding(layer, args, kwargs, before, right)
            with inside.fed():
                self._noise.append((noise, self._rounding(layer, args, kwargs, before, right)))

        return hook

    def _rounding(
        self, layer: nn.Module, args: Any, kwargs: Any, before: Tensor, right: Tensor
    ) -> float:
        """How far what the layer adds is from itself where products are rounded to BF16."""
        rounded = before.bfloat16().to(before.dtype)
        if "hidden_states" in kwargs:
            kwargs = kwargs | {"hidden_states": rounded}
        else:
            args = (rounded, *args[1:])
        with InBf16():
            again = layer.forward(*args, **kwargs)
        again = again[0] if isinstance(again, tuple) else again
        return float(row_errors((again - rounded)[0, self.tokens].cpu(), right).median())

    def norms(self) -> list[float]:
        """Mean norm of each layer's output."""
        return [round(value, 4) for value in self._norms]

    def tensors(self) -> dict[str, Tensor]:
        """`inputs` [layers + 1, tokens, hidden size]; `noise` [layers, 2]: of a layer as it is,
        and with fed products.
        """
        if not self._fits or self._logits is None:
            return {}
        inside = {
            name: value
            for place, one in enumerate(self._inside)
            for name, value in one.tensors(place).items()
        }
        return {
            "ids": torch.tensor(self.ids),
            "inputs": torch.stack(self._inputs),
            "tokens": self.tokens,
            "added": torch.stack(self._added).bfloat16(),
            "noise": torch.tensor(self._noise),
            "places": self.places,
            "logits": self._logits,
            **inside,
            **self._small,
        }
