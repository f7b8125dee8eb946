"""Reads or replaces inputs of linear layers in transformers, to calibrate or emulate W4A4; the
largest keys and values of each layer's cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from nibble.errors import ExitCode, NibbleError

MAX_TOKENS = 2048  # of one text
EXPERTS_IMPLEMENTATION = "nibble_watched"

# (names of the layers that share an input, the input [tokens, K]) -> the input they compute with.
See = Callable[[tuple[str, ...], Any], Any]


@contextmanager
def watched(model: Any, see: See) -> Iterator[None]:
    """Within it, each nn.Linear and expert projection of `model` computes with what `see` returns.

    Experts that transformers stacks are named as on disk: `….experts.3.gate_proj`, `….up_proj`,
    `….down_proj`. Raises CONFIG for experts with biases or in transposed form.
    """
    import torch
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            hooks.append(module.register_forward_pre_hook(_on_linear(name, see)))
        elif hasattr(module, "is_transposed") and hasattr(module, "down_proj"):
            if module.is_transposed or module.has_bias or not module.has_gate:
                what = f"the experts {name} have a form that nibble cannot calibrate"
                raise NibbleError(
                    ExitCode.CONFIG,
                    what=what,
                    expected="gate_up_proj [E, 2I, H] without biases",
                    action="use --activations bf16",
                )
            module.nibble_see = lambda leaves, x, name=name: see(
                tuple(f"{name}.{leaf}" for leaf in leaves), x
            )
    before = model.config._experts_implementation
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, _experts)
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_experts_implementation(before)
        for hook in hooks:
            hook.remove()


def _on_linear(name: str, see: See) -> Callable[..., Any]:
    return lambda _module, args: (see((name,), args[0]), *args[1:])


def _experts(layer: Any, x: Any, chosen: Any, weights: Any) -> Any:
    """Experts one after the other (transformers' eager form): [T, H], chosen and weights [T, k] ->
    [T, H].
    """
    import torch

    total = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        inside = layer.nibble_see((f"{expert}.gate_proj", f"{expert}.up_proj"), x[token])
        hidden = layer._apply_gate(torch.nn.functional.linear(inside, layer.gate_up_proj[expert]))
        hidden = layer.nibble_see((f"{expert}.down_proj",), hidden)
        out = (
            torch.nn.functional.linear(hidden, layer.down_proj[expert]) * weights[token, slot, None]
        )
        total.index_add_(0, token, out.to(total.dtype))
    return total


class Loaded(NamedTuple):
    """A BF16 model in transformers, on a GPU if available, and its tokenizer."""

    network: Any
    tokenizer: Any


def load(model_dir: Path) -> Loaded:
    """The whole model. Raises MODEL when transformers cannot load it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        network: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    except (OSError, ValueError, KeyError, ImportError) as error:
        what = f"transformers cannot load {model_dir} to calibrate it: {error}"
        action = "use --activations bf16, without --kv-cache and --keep-sensitive"
        raise NibbleError(ExitCode.MODEL, what=what, action=action) from None
    return Loaded(network.to(device).eval(), tokenizer)


def token_rows(tokenizer: Any, texts: Iterable[str]) -> list[list[int]]:
    """The first tokens of each text."""
    words = {"truncation": True, "max_length": MAX_TOKENS}
    return [tokenizer(text, **words).input_ids for text in texts]


class Largest(NamedTuple):
    """Magnitudes while a model reads texts: the input of each linear layer, by transformers' names;
    keys and values of each layer's cache.
    """

    inputs: dict[str, float]
    caches: list[tuple[float, float]]


def largest(model: Loaded, rows: Iterable[Sequence[int]]) -> Largest:
    """What the model computes with when it reads `rows` of token ids."""
    import torch

    found: defaultdict[str, float] = defaultdict(float)
    caches: list[tuple[float, float]] = []

    def see(names: tuple[str, ...], x: Any) -> Any:
        most = _magnitude(x)
        for name in names:
            found[name] = max(found[name], most)
        return x

    network = model.network
    with torch.inference_mode(), watched(network, see):
        for ids in rows:
            out = network(torch.tensor([list(ids)], device=network.device), use_cache=True)
            here = [
                (_magnitude(layer.keys), _magnitude(layer.values))
                for layer in getattr(out.past_key_values, "layers", ())
                if getattr(layer, "keys", None) is not None
            ]
            if not caches:
                caches = here
            caches = [(max(k, a), max(v, b)) for (k, v), (a, b) in zip(caches, here, strict=True)]
    return Largest(dict(found), caches)


def _magnitude(x: Any) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
