"""Which layers quantization harms most: an estimate for each, from one pass back through the model.

The Kullback-Leibler divergence of a model with a changed layer is, to second order, half of the
mean square of what the change adds to the log-probability of a token that the model itself samples
(the Fisher information). One forward and one backward pass give the gradient at each layer's
output; its product with the change of that output is the estimate, for all layers at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nibble.checkpoint.convert.calibrate import Loaded
from nibble.checkpoint.convert.quantize import GROUP_SIZE, Part, group, without_model
from nibble.errors import ExitCode, NibbleError

ROWS_AT_ONCE = 4
SEED = 0

Rounded = Callable[[Any], Any]  # a weight -> its values in NVFP4


def divergences(
    model: Loaded, modules: Iterable[str], rows: Sequence[Sequence[int]], rounded: Rounded
) -> dict[str, float]:
    """In nats for a token, for each of `modules` alone. Raises CONFIG for one that transformers
    has not as a linear layer.
    """
    import torch

    network = model.network
    linear = {
        without_model(name): part
        for name, part in network.named_modules()
        if isinstance(part, torch.nn.Linear)
    }
    found: defaultdict[str, Any] = defaultdict(float)
    hooks = [network.get_input_embeddings().register_forward_hook(_needs_gradient)]
    for module in modules:
        if (part := linear.get(without_model(module))) is None:
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"transformers has no linear layer {module}",
                expected="a dense model",
                action="drop --keep-sensitive, or exclude it with --exclude",
            )
        hooks.append(part.register_forward_hook(_adds_to(found, module, rounded)))
    generator = torch.Generator(network.device).manual_seed(SEED)
    was = {name for name, one in network.named_parameters() if one.requires_grad}
    try:
        network.requires_grad_(False)
        for begin in range(0, len(rows), ROWS_AT_ONCE):
            ids = torch.tensor(rows[begin : begin + ROWS_AT_ONCE], device=network.device)
            logprobs = network(ids, use_cache=False).logits.float().log_softmax(-1).flatten(0, 1)
            chosen = torch.multinomial(logprobs.detach().exp(), 1, generator=generator)
            logprobs.gather(1, chosen).sum().backward()
    finally:
        for hook in hooks:
            hook.remove()
        for name, one in network.named_parameters():
            one.requires_grad_(name in was)
    tokens = sum(map(len, rows))
    return {module: float(total) / 2 / tokens for module, total in found.items()}


def _needs_gradient(_module: Any, _args: Any, output: Any) -> Any:
    return output.requires_grad_()


def _adds_to(found: Any, module: str, rounded: Rounded) -> Callable[..., None]:
    """A hook of a linear layer that adds up, while the gradient comes back, the squares of its
    products with the change of the output.
    """

    def on_output(layer: Any, args: Any, output: Any) -> None:
        x = args[0].detach()

        def on_gradient(gradient: Any) -> None:
            change = layer.weight - rounded(layer.weight).to(layer.weight.dtype)
            per_token = (gradient.float() * (x @ change.T).float()).sum(-1)
            found[module] += per_token.square().sum()

        output.register_hook(on_gradient)

    return on_output


def most_sensitive(
    found: Mapping[str, float], parts: Iterable[Part], source_bytes: int, budget_bytes: float
) -> list[str]:
    """The modules to leave as they are, `source_bytes` an element: those with the most divergence
    for a byte, within the budget. Layers that vLLM fuses stay or go together.
    """
    groups: defaultdict[str, list[Part]] = defaultdict(list)
    for part in parts:
        groups[group(part.module)].append(part)

    def cost(name: str) -> float:
        elements = sum(part.rows * part.columns for part in groups[name])
        return elements * (source_bytes - 0.5 - 1 / GROUP_SIZE)

    def gain(name: str) -> float:
        return sum(found[part.module] for part in groups[name]) / cost(name)

    kept: list[str] = []
    for name in sorted(groups, key=gain, reverse=True):
        if cost(name) <= budget_bytes:
            budget_bytes -= cost(name)
            kept += [part.module for part in groups[name]]
    return kept
