"""FP8 KV scales of a mixed-precision ModelOpt checkpoint must be loaded for MLA too; modelopt.py
asks for Attention only.
"""

from __future__ import annotations

from typing import Any

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support.syntax import Sources

ROW = Row(
    id="N17",
    title=(
        "ModelOpt MIXED_PRECISION: no KV-cache method for MLA layers, so FP8 KV scales are not"
        " loaded"
    ),
    how=(
        "numeric: the tree's own get_quant_method and create_weights for an attention and an MLA"
        " layer"
    ),
    expect={"0.15.1": "not applicable", "0.16.0": "not applicable", "0.32.0": "defect"},
    verdict=(
        "The other ModelOpt configurations test for both classes. Without the method the layer has"
        " no k_scale to load, and an FP8 cache is scaled by 1.0 whatever the checkpoint says."
    ),
    instead="MLA layers get the KV-cache method as attention layers do",
    fix=Fix("patch", "vllm/modelopt-mixed-mla-kv-scales"),
    references=("vllm 0.32 model_executor/layers/quantization/modelopt.py:1837 and :221",),
)
MODELOPT = "vllm.model_executor.layers.quantization.modelopt"
CHECKPOINT = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "quantized_layers": {"model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16}},
}


def probe(tree: Tree) -> Finding:
    """Ask the configuration of a checkpoint with FP8 KV scales for the method of each kind of
    layer.
    """
    sources = Sources(tree)
    if not sources.has(f"{MODELOPT}.ModelOptMixedPrecisionConfig"):
        return not_applicable("this release does not read MIXED_PRECISION")
    config = sources.load(f"{MODELOPT}.ModelOptMixedPrecisionConfig").from_config(CHECKPOINT)
    loads = {
        kind: _loads_k_scale(config, sources.load(f"{MODELOPT}.{kind}"))
        for kind in ("Attention", "MLAAttention")
    }
    detail = "k_scale to load: " + ", ".join(f"{kind} {value}" for kind, value in loads.items())
    return sound(detail) if all(loads.values()) else defect(detail)


def _loads_k_scale(config: Any, kind: Any) -> bool:
    """Whether the configuration gives a layer of this class a parameter for its k_scale."""
    import torch

    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    method = config.get_quant_method(layer, "model.layers.0.self_attn.attn")
    if method is None:
        return False
    method.create_weights(layer)
    return "k_scale" in dict(layer.named_parameters())
