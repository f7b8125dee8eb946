"""A checkpoint's k_proj.k_scale must reach the attention layer's k_scale; glm4_moe.py renamed it
into qkv_proj first.
"""

from __future__ import annotations

from typing import Any

from nibble.engine.patching.probe import Finding, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support.syntax import Sources

ROW = Row(
    id="1",
    title="KeyError 'layers.41.self_attn.qkv_proj.k_scale' while GLM-4.7 loads",
    how="numeric: the tree's own load_weights over a layer with an attention scale",
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "sound"},
    verdict=(
        "The checkpoint has the scales, and the loader renames k_proj to qkv_proj before it remaps"
        " KV scales. The patch of glm47-nvfp4-sm120 takes them to be absent. Its `continue` leaves"
        " only the inner loop; by accident the remap then knows the mangled name qkqkv_proj, so the"
        " scales do arrive. Fixed upstream."
    ),
    instead="nothing to change in 0.32.0; the scales are loaded",
    references=(
        "vllm 0.16 model_executor/models/glm4_moe.py:528",
        "vllm 0.32 model_executor/layers/quantization/base_config.py:217",
    ),
)
LAYER = "layers.41.self_attn"
K_SCALE, V_SCALE = 0.25, 0.5


def probe(tree: Tree) -> Finding:
    """Load one layer without and with KV scales in the checkpoint, and look at the scale that
    arrives.
    """
    glm = "vllm.model_executor.models.glm4_moe"
    sources = Sources(tree)
    if not sources.has(f"{glm}.Glm4MoeModel.load_weights"):
        return not_applicable("there is no Glm4MoeModel.load_weights in this tree")
    without = _load(sources, glm, {})
    if isinstance(without, Exception):
        return defect(f"{without!r} for a checkpoint without KV scales")
    arrived = _load(
        sources, glm, {f"{LAYER}.k_proj.k_scale": K_SCALE, f"{LAYER}.v_proj.v_scale": V_SCALE}
    )
    if isinstance(arrived, Exception):
        return defect(
            f"{arrived!r} for a checkpoint with k_proj.k_scale; without it the layer loads"
        )
    detail = (
        f"k_proj.k_scale {K_SCALE} and v_proj.v_scale {V_SCALE} arrive as {arrived[0]} and"
        f" {arrived[1]}"
    )
    return sound(detail) if arrived == (K_SCALE, V_SCALE) else defect(detail)


def _load(sources: Sources, glm: str, scales: dict[str, float]) -> tuple[float, float] | Exception:
    """The attention layer's scales after load_weights, or the error it raised for a name."""
    import torch

    model = _model(sources, glm)
    weights = [(f"{LAYER}.k_proj.weight", torch.ones(2, 2))]
    weights += [(name, torch.tensor(value)) for name, value in scales.items()]
    try:
        sources.load(f"{glm}.Glm4MoeModel.load_weights")(model, weights)
    except (KeyError, ValueError) as error:
        return error
    attention = model.get_submodule(f"{LAYER}.attn")
    return attention.k_scale.item(), attention.v_scale.item()


def _model(sources: Sources, glm: str) -> Any:
    """What load_weights sees of a model: named parameters and their loaders, and where the tree
    has them, the mappers.
    """
    from types import SimpleNamespace

    import torch

    def module(**children: Any) -> torch.nn.Module:
        made = torch.nn.Module()
        for name, child in children.items():
            made.register_module(name, child)
        return made

    projection, attention = module(), module()
    projection.weight = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    projection.weight.weight_loader = lambda param, loaded, shard_id=None: param.data.copy_(loaded)  # type: ignore[attr-defined]
    for name in ("k_scale", "v_scale"):
        attention.register_parameter(
            name, torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)
        )
    layer = module(self_attn=module(qkv_proj=projection, attn=attention))
    model: Any = module(layers=module(**{"41": layer}))
    model.config = SimpleNamespace(
        num_hidden_layers=92, num_nextn_predict_layers=1, n_routed_experts=1, n_shared_experts=1
    )
    model.get_expert_mapping = lambda: []
    model.is_fused_shared_expert_enabled = False
    if sources.has(
        "vllm.model_executor.layers.quantization.base_config.QuantizationConfig.get_cache_scale_mapper"
    ):
        base = "vllm.model_executor.layers.quantization.base_config.QuantizationConfig"
        model.hf_to_vllm_mapper = sources.load(f"{glm}.Glm4MoeModel.hf_to_vllm_mapper")
        model.quant_config = SimpleNamespace(
            get_cache_scale_mapper=sources.load(f"{base}.get_cache_scale_mapper"),
            get_checkpoint_weight_mapper=sources.load(f"{base}.get_checkpoint_weight_mapper"),
            _ignore_unexpected_suffixes=[],
        )
    return model
