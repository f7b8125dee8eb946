"""A warm worker's model against a computed reference (`nibble reference`): the embedding, what each
layer adds, and the logits.

One eager pass over the reference's longer text, in which each layer gets the reference's input in
place of the layer before it:
rounding does not add up from layer to layer, and a wrong layer is named. The products within a
layer get the reference's inputs
too, where they are found by name. Numbers only; the supervisor judges them.
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

from nibble.engine.contract import (
    Comparison,
    LayerComparison,
    LayerDifference,
    LogitsComparison,
    NormsComparison,
    norm_name,
)
from nibble.engine.plugin.report.attention import one_request, pass_of_this_worker
from nibble.engine.plugin.report.inside import Inside, halves, row_errors
from nibble.engine.plugin.report.kernels_used import models_of
from nibble.engine.plugin.report.probes import Unknown

ROUNDING = 2.0**-8  # of a residual stream in BF16, relative to its norm
SAME = 0.02  # a pass that is fed its own inputs gives its own outputs, but for this
Stream = tuple[
    Tensor, Tensor
]  # what went into a layer and came out of it, [tokens, hidden size] in float32


@torch.inference_mode()
def compare_with_definition(worker: Any, file: Path) -> Comparison:
    """`embedding`: relative error; `layers`: one entry each; `logits`. Raises Unknown where this
    model cannot be followed.
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
    own, _ = run_layers(worker, model, layers, ids)
    check_followed(worker, model, layers, ids, own)
    inside = Inside(model, layers, reference, tokens)
    with inside.fed():
        found, hidden = run_layers(worker, model, layers, ids, fed)
    if not inside.is_complete:
        found, hidden = run_layers(worker, model, layers, ids, fed)
    places = reference["places"][reference["places"] < tokens]
    network: Any = model
    logits = network.compute_logits(hidden[places.to(worker.device)])
    return {
        "tokens": tokens,
        "embedding": relative(own[0][0].cpu(), reference["inputs"][0, :tokens].float()),
        "layers": compare_layers(found, fed, reference, inside),
        "cache": cache_form(worker),
        "norms": compare_norms(model, reference),
        "logits": (
            compare_logits(logits, reference["logits"][: len(places)]) if len(places) else None
        ),
    }


def compare_layers(
    found: list[Stream], fed: Tensor, reference: dict[str, Tensor], inside: Inside
) -> list[LayerComparison]:
    """One entry for each layer: what it adds, its noise, and `inside` where its products were
    fed.
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
            found,
            fed.float()[:-1],
            reference["added"],
            reference["noise"],
            inside.found,
            strict=True,
        )
    ]


def cache_form(worker: Any) -> str:
    """bf16 or fp8: what rounding of the KV cache explains."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    kinds = {str(getattr(layer, "kv_cache_dtype", "")) for layer in layers}
    return "fp8" if any(kind.startswith("fp8") for kind in kinds) else "bf16"


def compare_norms(model: nn.Module, reference: dict[str, Tensor]) -> NormsComparison:
    """Weights of norms that the model has by the checkpoint's names: how many, and which are
    others.

    Where most are, the model keeps them in another form, and none is compared.
    """
    own = dict(model.named_parameters())
    known = {
        name: value
        for key, value in reference.items()
        if (name := norm_name(key)) in own and own[name].shape == value.shape
    }
    wrong = [
        name
        for name, value in known.items()
        if relative(own[name].data.float().cpu()[None], value[None]) > SAME
    ]
    if 2 * len(wrong) > len(known):
        return {"compared": 0, "wrong": []}
    return {"compared": len(known), "wrong": wrong[:4]}


def layers_of(model: nn.Module, count: int) -> list[nn.Module]:
    """The decoder layers, first to last."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            names = inspect.signature(module[0].forward).parameters
            if "hidden_states" in names:
                return list(module)
    raise Unknown(f"no list of {count} layers that take hidden_states")


def run_layers(
    worker: Any, model: Any, layers: list[nn.Module], ids: Tensor, fed: Tensor | None = None
) -> tuple[list[Stream], Tensor]:
    """Each layer's input and output in one pass, and what the model returns.

    `fed`: the inputs that layers get, and the last output.
    """
    seen: list[list[Tensor]] = [[] for _ in layers]
    with ExitStack() as hooks:
        for place, layer in enumerate(layers):
            before, after = _hooks(seen[place], layer, place, fed, place + 1 == len(layers))
            for handle in (
                layer.register_forward_pre_hook(before, with_kwargs=True),
                layer.register_forward_hook(after),
            ):
                hooks.callback(handle.remove)
        hidden = forward(worker, model, ids)
    if any(len(one) != 2 for one in seen):
        raise Unknown("a layer was not called once in a pass")
    return [(before, after) for before, after in seen], hidden


def _hooks(
    seen: list[Tensor], layer: nn.Module, place: int, fed: Tensor | None, is_last: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    signature = inspect.signature(layer.forward)

    def before(_layer: nn.Module, args: Any, kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        hidden, residual = given["hidden_states"], given.get("residual")
        seen.append(_sum(hidden, residual))
        if fed is None:
            return None
        value = fed[place].to(hidden.dtype, copy=True).view_as(hidden)  # kernels write into it
        # vLLM's layers add both before their first norm (vllm 0.32 qwen3.py:242)
        given["hidden_states"] = value if residual is None else torch.zeros_like(hidden)
        if residual is not None:
            given["residual"] = value
        return bound.args, bound.kwargs

    def after(_layer: nn.Module, _args: Any, output: Any) -> Any:
        pair = output if isinstance(output, tuple) else (output, None)
        seen.append(_sum(pair[0], pair[1]))
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
    """The residual stream [tokens, hidden size]; a copy, because kernels add in place."""
    found = hidden.float().clone() if residual is None else hidden.float() + residual.float()
    return found.view(-1, found.shape[-1])  # vLLM's Transformers backend has a batch of one


def check_followed(
    worker: Any, model: Any, layers: list[nn.Module], ids: Tensor, own: list[Stream]
) -> None:
    """Raises Unknown where layers do not pass on the sum of hidden states and residual, so that
    feeding it means nothing.
    """
    for (_, after), (before, _) in itertools.pairwise(own):
        if relative(after, before) > SAME:
            raise Unknown("something happens between two layers")
    inputs = torch.stack([before for before, _ in own] + [own[-1][1]])
    again, _ = run_layers(worker, model, layers, ids, inputs)
    for (before, after), (_, other) in zip(own, again, strict=True):
        if relative(other, after) > SAME and relative(other - before, after - before) > 10 * SAME:
            raise Unknown("layers take more than the sum of hidden states and residual")


def forward(worker: Any, model: Any, ids: Tensor) -> Tensor:
    """One eager pass over `ids`, through the KV cache's last blocks, as of a new request."""
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
        found = model(
            input_ids=ids.to(worker.device, torch.int32),
            positions=positions,
            intermediate_tensors=None,
            inputs_embeds=None,
        )
    if not isinstance(found, Tensor):
        raise Unknown("the model returns more than hidden states")
    return found


def relative(found: Tensor, right: Tensor) -> float:
    """|found - right| / |right|, the median of rows."""
    return float(row_errors(found, right).median())


def compare_layer(added: Tensor, right: Tensor, after: Tensor) -> LayerDifference:
    """What a layer adds to the stream [tokens, hidden size]: relative errors of the first and
    second half of the tokens beyond BF16's rounding of the stream, the factor by which it is too
    large or small, and the norm of its output.
    """
    if not added.isfinite().all():
        return {"early": math.inf, "late": math.inf, "factor": math.nan, "norm": math.inf}
    distance = ((added - right).norm(dim=-1) - ROUNDING * after.norm(dim=-1)).clamp(min=0)
    errors = distance / right.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    factor = float((added * right).sum() / (right * right).sum())
    norm = round(float(after.norm(dim=-1).mean()), 4)
    return {**halves(errors), "factor": round(factor, 5), "norm": norm}


def compare_logits(found: Tensor, right: Tensor) -> LogitsComparison:
    """Relative error and factor of centered logits, and the token whose logit is off most at all
    places, with how much.
    """
    width = min(found.shape[-1], right.shape[-1])
    values, wanted = (x.float().cpu()[:, :width] for x in (found, right))
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
