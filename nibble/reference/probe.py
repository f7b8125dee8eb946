"""One pass of a reference that records each layer's inputs and output, and the logits.

The worker feeds the same inputs to vLLM's layers (nibble/engine/plugin/report/definition.py).
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

LOGIT_PLACES = 4  # positions of the text for which the logits of the whole vocabulary are kept
SAMPLED = 16  # tokens from the whole text, and the same number from its last quarter


class Probe:
    """`run` is the pass over the tokens `ids`; `tensors` returns what it recorded.

    small: further tensors to store, such as the weights of norms.
    """

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
                # A residual stream of another shape, as in Gemma 3n: layers are not compared.
                self._fits = False
                return
            inside.finish()
            if not self._inputs:
                self._inputs.append(before[0].bfloat16().cpu())
            self._inputs.append(after[0].bfloat16().cpu())
            added = (after - before)[0, self.tokens].float().cpu()
            self._added.append(added)
            self._norms.append(float(after[0].norm(dim=-1).mean()))
            noise = self._rounding(layer, args, kwargs, before, added)
            with inside.fed():
                self._noise.append((noise, self._rounding(layer, args, kwargs, before, added)))

        return hook

    def _rounding(
        self, layer: nn.Module, args: Any, kwargs: Any, before: Tensor, added: Tensor
    ) -> float:
        """The median relative change of what the layer adds when products are rounded to BF16."""
        rounded = before.bfloat16().to(before.dtype)
        if "hidden_states" in kwargs:
            kwargs = kwargs | {"hidden_states": rounded}
        else:
            args = (rounded, *args[1:])
        with InBf16():
            output = layer.forward(*args, **kwargs)
        after = output[0] if isinstance(output, tuple) else output
        return float(row_errors((after - rounded)[0, self.tokens].cpu(), added).median())

    def norms(self) -> list[float]:
        """Mean norm of each layer's output."""
        return [round(value, 4) for value in self._norms]

    def tensors(self) -> dict[str, Tensor]:
        """The recorded tensors by name; empty if the layers cannot be compared.

        ids [tokens]; tokens: the sampled ones, [sampled]; places: positions with logits;
        inputs: BF16 [layers + 1, tokens, hidden size], the last is the output of the last layer;
        added: BF16 [layers, sampled, hidden size], what each layer adds to the residual stream;
        noise: [layers, 2], the rounding of a layer, without and with fed inputs of its products;
        logits: float32 [places, vocabulary].
        """
        if not self._fits or self._logits is None:
            return {}
        inside = {
            name: value
            for place, points in enumerate(self._inside)
            for name, value in points.tensors(place).items()
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
