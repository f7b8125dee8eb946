"""Faults of a model's structure, put into a running worker: what a server does that computes
each product rightly. For tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.vllm_plugins.vllm_faults import Undo, in_place, replaced


def model_of(worker: Any) -> Any:
    return worker.model_runner.get_model()


def layers_of(worker: Any) -> Any:
    return model_of(worker).model.layers


def together(undo: list[Undo]) -> Undo:
    return lambda: [one() for one in reversed(undo)]


def rotary(worker: Any) -> list[Any]:
    """One may be shared by all layers."""
    found = {
        id(one): one for one in model_of(worker).modules() if hasattr(one, "_compute_cos_sin_cache")
    }
    return list(found.values())


def rope_off(worker: Any) -> Undo:
    same = lambda positions, query, key=None, *_: (query, key)  # noqa: E731
    return together([replaced(one, "_forward_method", same) for one in rotary(worker)])


def theta_times_ten(worker: Any) -> Undo:
    undo = []
    for one in rotary(worker):
        base = one.base
        one.base = base * 10
        cache = one._compute_cos_sin_cache()
        one.base = base
        undo.append(in_place(one.cos_sin_cache, lambda old, cache=cache: cache.to(old)))
    return together(undo)


def epsilon(worker: Any) -> Undo:
    norms = [one for one in model_of(worker).modules() if hasattr(one, "variance_epsilon")]
    return together([replaced(one, "variance_epsilon", 0.1) for one in norms])


def layers_swapped(worker: Any) -> Undo:
    layers = layers_of(worker)

    def swap() -> None:
        layers[1], layers[2] = layers[2], layers[1]

    swap()
    return swap


def changed_logits(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Undo]:
    def inject(worker: Any) -> Undo:
        model = model_of(worker)
        compute = model.compute_logits
        return replaced(
            model, "compute_logits", lambda *args, **kwargs: change(compute(*args, **kwargs))
        )

    return inject


def one_raised(logits: torch.Tensor) -> torch.Tensor:
    logits = logits.clone()
    logits[..., 300] += 3
    return logits


def embedding_permuted(worker: Any) -> Undo:
    embed = model_of(worker).model.embed_tokens
    forward, size = embed.forward, embed.num_embeddings
    return replaced(embed, "forward", lambda ids: forward((ids + 1) % size))


def gelu(worker: Any) -> Undo:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    def wrong(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.gelu(gate) * up

    undo = []
    for module in model_of(worker).modules():
        if type(module).__name__ == "SiluAndMul":
            undo.append(replaced(module, "_forward_method", wrong))
        if hasattr(module, "w13_weight"):
            undo.append(replaced(module, "activation", MoEActivation.GELU))
    return together(undo)


def mlp_smaller(worker: Any) -> Undo:
    mlp = layers_of(worker)[1].mlp
    forward = mlp.forward
    return replaced(mlp, "forward", lambda *args, **kwargs: forward(*args, **kwargs) * 0.9)


def norms_swapped(worker: Any) -> Undo:
    attention = layers_of(worker)[1].self_attn

    def swap() -> None:
        attention.q_norm, attention.k_norm = attention.k_norm, attention.q_norm

    swap()
    return swap


def window(worker: Any) -> Undo:
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    return together(
        [
            # FlashAttention has what lies before and after a token
            replaced(
                one.impl,
                "sliding_window",
                (127, 0) if isinstance(one.impl.sliding_window, tuple) else 128,
            )
            for one in layers
            if hasattr(getattr(one, "impl", None), "sliding_window")
        ]
    )


FAULTS: dict[str, Callable[[Any], Undo]] = {
    "RoPE switched off": rope_off,
    "theta ten times as large": theta_times_ten,
    "epsilon 0.1 in all norms": epsilon,
    "two layers swapped": layers_swapped,
    "permuted head": changed_logits(lambda logits: logits.roll(1, -1)),
    "permuted embedding": embedding_permuted,
    "GELU for SiLU": gelu,
    "logits times 0.9": changed_logits(lambda logits: logits * 0.9),
    "one logit raised by 3": changed_logits(one_raised),
    "an MLP's output times 0.9": mlp_smaller,
    "q and k norms swapped in one layer": norms_swapped,
    "a window of 128 where none is": window,
}
