"""Reads or replaces inputs of linear layers in transformers, to calibrate or emulate W4A4."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def input_amax(model_dir: Path, texts: Iterable[str]) -> dict[str, float]:
    """The largest input of each linear layer while the BF16 model in `model_dir` reads `texts`.

    Names are those of transformers. It loads the whole model, on a GPU if available. Raises MODEL
    when transformers cannot load it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    except (OSError, ValueError, KeyError, ImportError) as error:
        what = f"transformers cannot load {model_dir} to calibrate it: {error}"
        raise NibbleError(ExitCode.MODEL, what=what, action="use --activations bf16") from None
    found: defaultdict[str, float] = defaultdict(float)

    def see(names: tuple[str, ...], x: Any) -> Any:
        largest = float(x.abs().max()) if x.numel() else 0.0
        for name in names:
            found[name] = max(found[name], largest)
        return x

    with torch.inference_mode(), watched(model.to(device).eval(), see):
        for text in texts:
            ids = tokenizer(
                text, return_tensors="pt", truncation=True, max_length=MAX_TOKENS
            ).input_ids
            model(ids.to(device))
    return dict(found)
