"""Without a q_scale in the checkpoint kv_cache.py says that it sets the query's scale to
k_scale, and leaves it at 1.0.
"""

from __future__ import annotations

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support.messages import Messages
from probes.support.syntax import Sources

ROW = Row(
    id="N18",
    title="FP8 attention: the log says q_scale is set to k_scale, the value is 1.0",
    how=(
        "numeric: the tree's own create_weights and process_weights_after_loading, and what"
        " they log"
    ),
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "defect"},
    verdict=(
        "The value is right and the message is wrong. k_scale is amax(k)/448, so a query larger"
        " than the largest key of the calibration would be clipped; 1.0 clips beyond 448 only, and"
        " E4M3 keeps its precision down to 2^-6. Two backends refuse any other value."
    ),
    instead="the message says 1.0, and the assignment that has no effect is gone",
    fix=Fix("patch", "vllm/kv-query-scale-message"),
    references=(
        "vllm 0.32 model_executor/layers/quantization/kv_cache.py:145-152, :182",
        "vllm 0.32 model_executor/layers/attention/attention.py:521",
        "vllm 0.32 v1/attention/backends/mla/cutlass_mla.py:259",
        "vllm-project/vllm#15734",
        "vllm-project/vllm#38975",
    ),
)
METHOD = "vllm.model_executor.layers.quantization.kv_cache.BaseKVCacheMethod"
K_SCALE = 0.25


def probe(tree: Tree) -> Finding:
    """Load k_scale and v_scale but no q_scale, as ModelOpt exports them."""
    import torch

    messages = Messages()
    sources = Sources(tree, messages.given)
    if not sources.has(METHOD):
        return not_applicable("there is no BaseKVCacheMethod in this tree")
    sources.given["vllm.platforms.current_platform"] = sources.load(
        "vllm.platforms.interface.UnspecifiedPlatform"
    )()
    layer = torch.nn.Module()
    layer.kv_cache_dtype, layer.calculate_kv_scales = "fp8_e4m3", False  # type: ignore[assignment]
    # What set_default_quant_scales gives an attention layer before any checkpoint is read
    # (attention.py:132).
    for name in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale", "_k_scale_cpu", "_v_scale_cpu"):
        layer.register_buffer(name, torch.tensor(1.0))
    method = sources.load(METHOD)(None)
    method.create_weights(layer)
    for name in ("k_scale", "v_scale"):
        layer.get_parameter(name).data.fill_(K_SCALE)
    method.process_weights_after_loading(layer)
    said = [message for message in messages if "q scaling factor" in message]
    value = layer._q_scale_float
    detail = f"k_scale {K_SCALE}, q_scale {value}; the log: {said[0] if said else 'nothing'}"
    claims_k_scale = any("k_scale" in message for message in said)
    return sound(detail) if value == (K_SCALE if claims_k_scale else 1.0) else defect(detail)
