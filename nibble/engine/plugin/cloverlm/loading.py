"""Loads CloverLM's tensors into the model: BF16, or packed NVFP4 with scales in 128x4 tiles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import PPMissingLayer

from nibble.engine.plugin.quartet2 import PACKED_LEAVES, Quartet2LinearMethod, is_packed

EMBEDDING, HEAD = "transformer.emb", "transformer.linear"


def load_model(model: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Load this rank's part of the weights and return the names of its parameters.

    Raises ValueError for missing or unknown tensors.
    """
    projections = _projections(model)
    parameters = dict(model.named_parameters())
    parts: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    loaded: set[str] = set()
    for stored, tensor in weights:
        module, _, leaf = stored.rpartition(".")
        if _is_elsewhere(model, stored):
            continue
        if module in projections:
            parts[module][leaf] = tensor
            if _is_complete(parts[module]):
                loaded |= _load_projection(*projections.pop(module), module, parts.pop(module))
            continue
        name = stored.replace(f"{HEAD}.", "linear.")
        if name not in parameters:
            raise ValueError(f"{stored} is not a tensor of a CloverLM model with this config.json")
        _load_parameter(model, name, parameters[name], tensor)
        loaded.add(name)
    missing = sorted(projections) or sorted(set(parameters) - loaded)
    if missing:
        found = ", ".join(sorted(parts[missing[0]])) or "nothing"
        raise ValueError(
            f"{len(missing)} weights of CloverLM are missing, the first is {missing[0]} (found of"
            f" it: {found})"
        )
    return loaded


def _projections(model: Any) -> dict[str, tuple[str, nn.Module, int]]:
    """Stored name of each product of a block -> (name of the layer, layer, index of the part)."""
    products: dict[str, tuple[str, nn.Module, int]] = {}
    inner = model.transformer
    for index in range(inner.start, inner.end):
        block, path = inner.blocks[index], f"transformer.blocks.{index}"
        for part, name in enumerate(("lq", "lk", "lv")):
            products[f"{path}.mhsa.{name}"] = (f"{path}.mhsa.qkv", block.mhsa.qkv, part)
        products[f"{path}.mhsa.lo"] = (f"{path}.mhsa.lo", block.mhsa.lo, 0)
        products[f"{path}.mlp.l1.0"] = (f"{path}.mlp.l1", block.mlp.l1, 0)
        products[f"{path}.mlp.l2"] = (f"{path}.mlp.l2", block.mlp.l2, 0)
    return products


def _is_elsewhere(model: Any, stored: str) -> bool:
    """Whether another pipeline rank has a tensor, or it is a head that is tied to the embedding."""
    inner = model.transformer
    if stored.startswith("transformer.blocks."):
        index = stored.split(".")[2]
        return (
            index.isdecimal()
            and not inner.start <= int(index) < inner.end
            and int(index) < len(inner.blocks)
        )
    if stored.startswith(f"{HEAD}."):
        return model.config.tie_word_embeddings or isinstance(model.linear, PPMissingLayer)
    if stored.startswith(f"{EMBEDDING}."):
        return isinstance(inner.emb, PPMissingLayer)
    return stored.startswith("transformer.out_norm.") and isinstance(inner.out_norm, PPMissingLayer)


def _is_complete(part: dict[str, Tensor]) -> bool:
    return "weight" in part and (not is_packed(part["weight"]) or part.keys() >= set(PACKED_LEAVES))


def _load_projection(
    name: str, layer: Any, part: int, stored: str, tensors: dict[str, Tensor]
) -> set[str]:
    method = layer.quant_method
    if isinstance(method, Quartet2LinearMethod):
        method.load(layer, part, stored, tensors)
        return {f"{name}.{leaf}" for leaf in PACKED_LEAVES}
    if is_packed(tensors["weight"]):
        raise ValueError(f"{stored} is packed NVFP4, which needs --quantization quartet2")
    loader, parameter = layer.weight.weight_loader, layer.weight
    loader(parameter, tensors["weight"], *((part,) if name.endswith(".qkv") else ()))
    return {f"{name}.weight"}


def _load_parameter(model: Any, name: str, parameter: nn.Parameter, tensor: Tensor) -> None:
    if name.endswith(".mhsa.scale"):
        heads = model.transformer.blocks[int(name.split(".")[2])].mhsa.heads.queries
        tensor = tensor.reshape(-1, 1)[heads.start : heads.stop]
    getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
