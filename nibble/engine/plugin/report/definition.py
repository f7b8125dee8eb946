"""Compares a warm worker's model with a computed reference (`nibble reference`): the embedding, the
output of each layer, and the logits.

It runs one eager pass over the reference's longer text. Each layer gets the reference's input, so
rounding does not add up from layer to layer, and the first wrong layer is known. The products in a
layer get the reference's inputs too, if their names match. The result is numbers; the supervisor
compares them with limits (nibble/canary/computed.py).
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nibble.engine.contract.reference import norm_name
from nibble.engine.contract.report import (
    Comparison,
    LayerComparison,
    LayerDifference,
    LogitsComparison,
    NormsComparison,
)
from nibble.engine.plugin.report.attention import one_request, pass_of_this_worker
from nibble.engine.plugin.report.inside import Inside, halves, row_errors
from nibble.engine.plugin.report.kernels_used import models_of
from nibble.engine.plugin.report.probes import Unknown

ROUNDING = 2.0**-8  # of a residual stream in BF16, relative to its norm
SAME = 0.02  # relative difference of two passes with the same inputs, at most
Stream = tuple[Tensor, Tensor]  # input and output of a layer, float32 [tokens, hidden size]


@torch.inference_mode()
def compare_with_definition(worker: Any, file: Path) -> Comparison:
    """Compare the worker's model with the reference's tensors in `file`.

    Raises Unknown if the model's structure does not allow it.
    """
    from safetensors.torch import load_file

    config = worker.vllm_config
    if config.parallel_config.world_size_across_dp > 1:
        raise Unknown("layers of several ranks are not compared")
    reference = load_file(file)
    tokens = min(
        len(reference["ids"]),
        config.model_config.max_model_len - 1,
        config.scheduler_config.max_num_batched_tokens,
    )
    model = next(iter(models_of(worker.model_runner)))
    ids, fed = reference["ids"][:tokens], reference["inputs"][:, :tokens].to(worker.device)
    layers = layers_of(model, len(fed) - 1)
    unfed, _ = run_layers(worker, model, layers, ids)
    check_feeding_works(worker, model, layers, ids, unfed)
    inside = Inside(model, layers, reference, tokens)
    with inside.fed():
        streams, hidden = run_layers(worker, model, layers, ids, fed)
    if not inside.is_complete:
        streams, hidden = run_layers(worker, model, layers, ids, fed)
    places = reference["places"][reference["places"] < tokens]
    network: Any = model
    logits = network.compute_logits(hidden[places.to(worker.device)])
    return {
        "tokens": tokens,
        "embedding": relative(unfed[0][0].cpu(), reference["inputs"][0, :tokens].float()),
        "layers": compare_layers(streams, fed, reference, inside),
        "cache": cache_form(worker),
        "norms": compare_norms(model, reference),
        "logits": (
            compare_logits(logits, reference["logits"][: len(places)]) if len(places) else None
        ),
    }


def compare_layers(
    streams: list[Stream], fed: Tensor, reference: dict[str, Tensor], inside: Inside
) -> list[LayerComparison]:
    """One entry per layer.

    fed: the inputs that the layers got, [layers + 1, tokens, hidden size]. The entries have points
    and the noise for fed products only if `inside` is complete.
    """
    kept = reference["tokens"] < fed.shape[1]
    rows, column = reference["tokens"][kept], int(inside.is_complete)
    return [
        {
            **compare_layer((after - before).cpu()[rows], added[kept].float(), after.cpu()[rows]),
            "noise": round(float(noise[column]), 5),
            "inside": points if inside.is_complete else [],
        }
        for (_, after), before, added, noise, points in zip(
            streams,
            fed.float()[:-1],
            reference["added"],
            reference["noise"],
            inside.found,
            strict=True,
        )
    ]


def cache_form(worker: Any) -> str:
    """The format of the KV cache, "bf16" or "fp8", which determines a limit."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    kinds = {str(getattr(layer, "kv_cache_dtype", "")) for layer in layers}
    return "fp8" if any(kind.startswith("fp8") for kind in kinds) else "bf16"


def compare_norms(model: nn.Module, reference: dict[str, Tensor]) -> NormsComparison:
    """Compare weights of norms that the model has under the checkpoint's names.

    If most of them differ, the model stores norms in another form, and none is compared.
    """
    parameters = dict(model.named_parameters())
    known = {
        name: value
        for key, value in reference.items()
        if (name := norm_name(key)) in parameters and parameters[name].shape == value.shape
    }
    wrong = [
        name
        for name, value in known.items()
        if relative(parameters[name].data.float().cpu()[None], value[None]) > SAME
    ]
    if 2 * len(wrong) > len(known):
        return {"compared": 0, "wrong": []}
    return {"compared": len(known), "wrong": wrong[:4]}


def layers_of(model: nn.Module, count: int) -> list[nn.Module]:
    """The `count` decoder layers, first to last. Raises Unknown if there is no such list."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            names = inspect.signature(module[0].forward).parameters
            if "hidden_states" in names:
                return list(module)
    raise Unknown(f"no list of {count} layers that take hidden_states")


def run_layers(
    worker: Any, model: Any, layers: list[nn.Module], ids: Tensor, fed: Tensor | None = None
) -> tuple[list[Stream], Tensor]:
    """Each layer's input and output in one pass, and the model's hidden states.

    fed: inputs to give to the layers and, last, the output to use for the last layer.
    Raises Unknown if a layer is not called exactly once.
    """
    recorded: list[list[Tensor]] = [[] for _ in layers]
    with ExitStack() as hooks:
        for place, layer in enumerate(layers):
            before, after = _hooks(recorded[place], layer, place, fed, place + 1 == len(layers))
            for handle in (
                layer.register_forward_pre_hook(before, with_kwargs=True),
                layer.register_forward_hook(after),
            ):
                hooks.callback(handle.remove)
        hidden = forward(worker, model, ids)
    if any(len(tensors) != 2 for tensors in recorded):
        raise Unknown("a layer was not called once in a pass")
    return [(before, after) for before, after in recorded], hidden


def _hooks(
    recorded: list[Tensor], layer: nn.Module, place: int, fed: Tensor | None, is_last: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Hooks before and after a layer, which append to `recorded`."""
    signature = inspect.signature(layer.forward)

    def before(_layer: nn.Module, args: Any, kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        arguments = bound.arguments
        hidden, residual = arguments["hidden_states"], arguments.get("residual")
        recorded.append(_sum(hidden, residual))
        if fed is None:
            return None
        # A copy, because kernels write into their input.
        value = fed[place].to(hidden.dtype, copy=True).view_as(hidden)
        # vLLM's layers add both before their first norm (vllm 0.32 qwen3.py:242).
        arguments["hidden_states"] = value if residual is None else torch.zeros_like(hidden)
        if residual is not None:
            arguments["residual"] = value
        return bound.args, bound.kwargs

    def after(_layer: nn.Module, _args: Any, output: Any) -> Any:
        pair = output if isinstance(output, tuple) else (output, None)
        recorded.append(_sum(pair[0], pair[1]))
        if fed is None or not is_last:
            return None
        value = fed[place + 1].to(pair[0].dtype, copy=True).view_as(pair[0])
        if not isinstance(output, tuple):
            return value
        return (
            value if pair[1] is None else torch.zeros_like(value),
            *((value,) if pair[1] is not None else ()),
            *output[2:],
        )

    return before, after


def _sum(hidden: Tensor, residual: Tensor | None) -> Tensor:
    """The residual stream, float32 [tokens, hidden size]. A copy, because kernels add in place."""
    total = hidden.float().clone() if residual is None else hidden.float() + residual.float()
    return total.view(-1, total.shape[-1])  # vLLM's Transformers backend adds a batch dimension


def check_feeding_works(
    worker: Any, model: Any, layers: list[nn.Module], ids: Tensor, unfed: list[Stream]
) -> None:
    """Raise Unknown if the layers depend on more than the sum of hidden states and residual.

    A pass that is fed the inputs of the pass `unfed` has to give the same outputs.
    """
    for (_, after), (before, _) in itertools.pairwise(unfed):
        if relative(after, before) > SAME:
            raise Unknown("something happens between two layers")
    inputs = torch.stack([before for before, _ in unfed] + [unfed[-1][1]])
    fed, _ = run_layers(worker, model, layers, ids, inputs)
    for (before, after), (_, other) in zip(unfed, fed, strict=True):
        if relative(other, after) > SAME and relative(other - before, after - before) > 10 * SAME:
            raise Unknown("layers take more than the sum of hidden states and residual")


def forward(worker: Any, model: Any, ids: Tensor) -> Tensor:
    """One eager pass over `ids` as a new request, in the last blocks of the KV cache.

    Raises Unknown if the model does not return a single tensor.
    """
    runner, count = worker.model_runner, len(ids)
    metadata, slots = {}, {}
    for groups in getattr(runner, "attn_groups", ()):
        for group in groups:
            request = one_request(worker, group, 0, count, count)
            built = group.build_metadata(request, 0)
            metadata |= dict.fromkeys(group.layer_names, built)
            slots |= dict.fromkeys(group.layer_names, request.slot_mapping)
    positions = torch.arange(count, device=worker.device)
    if getattr(runner, "uses_mrope", False):
        positions = positions.expand(3, -1)
    context = {"attn_metadata": metadata, "slot_mapping": slots, "skip_compiled": True}
    with pass_of_this_worker(worker.vllm_config, count, **context):
        hidden = model(
            input_ids=ids.to(worker.device, torch.int32),
            positions=positions,
            intermediate_tensors=None,
            inputs_embeds=None,
        )
    if not isinstance(hidden, Tensor):
        raise Unknown("the model returns more than hidden states")
    return hidden


def relative(actual: Tensor, expected: Tensor) -> float:
    """The median over rows of |actual - expected| / |expected|."""
    return float(row_errors(actual, expected).median())


def compare_layer(added: Tensor, expected: Tensor, after: Tensor) -> LayerDifference:
    """Compare what a layer adds to the residual stream. All arguments are [tokens, hidden size].

    added: by the layer; expected: by the reference's layer; after: the layer's output. The errors
    are relative and leave out the rounding of the stream to BF16. `factor` is how many times too
    large `added` is.
    """
    if not added.isfinite().all():
        return {"early": math.inf, "late": math.inf, "factor": math.nan, "norm": math.inf}
    distance = ((added - expected).norm(dim=-1) - ROUNDING * after.norm(dim=-1)).clamp(min=0)
    errors = distance / expected.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    factor = float((added * expected).sum() / (expected * expected).sum())
    norm = round(float(after.norm(dim=-1).mean()), 4)
    return {**halves(errors), "factor": round(factor, 5), "norm": norm}


def compare_logits(actual: Tensor, expected: Tensor) -> LogitsComparison:
    """Compare logits [positions, vocabulary], centered at each position.

    Gives the relative error, the factor, and the token whose mean logit differs most (`off`, with
    the standard deviation over all tokens, `spread`).
    """
    width = min(actual.shape[-1], expected.shape[-1])
    values, wanted = (x.float().cpu()[:, :width] for x in (actual, expected))
    values, wanted = (x - x.mean(-1, keepdim=True) for x in (values, wanted))
    if not values.isfinite().all():
        return {
            "error": math.inf,
            "factor": math.nan,
            "token": -1,
            "off": math.inf,
            "spread": math.inf,
        }
    off = values - wanted
    mean = off.mean(0)
    token = int(mean.abs().argmax())
    return {
        "error": round(relative(values, wanted), 5),
        "factor": round(float((values * wanted).sum() / (wanted * wanted).sum()), 5),
        "token": token,
        "off": round(float(mean[token]), 4),
        "spread": round(float(mean.std()), 4),
    }
