"""Gate and up of an expert with different global scales must keep their values; vLLM dequantizes
both with gate's.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support import plugin
from probes.support.nvfp4 import (
    SOUND_ERROR,
    Packed,
    dequantize,
    normal_weights,
    quantize,
    shard_errors,
)
from probes.support.syntax import Sources

if TYPE_CHECKING:
    import torch

QUANTIZATION = "vllm.model_executor.layers.quantization"
ORACLE = "vllm.model_executor.layers.fused_moe.oracle.nvfp4"
MODELOPT = f"{QUANTIZATION}.modelopt.ModelOptNvFp4FusedMoE.process_weights_after_loading"
COMPRESSED = (
    f"{QUANTIZATION}.compressed_tensors.compressed_tensors_moe"
    ".compressed_tensors_moe_w4a4_nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod.process_weights_after_loading"
)
ROW = Row(
    id="N10",
    title="NVFP4 MoE: the up half of w13 is dequantized with gate's global scale",
    how=(
        "numeric: experts of the tree's ModelOpt and compressed-tensors methods, converted for a"
        " kernel"
    ),
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "defect"},
    verdict=(
        "Both methods take column 0 of the two scales and only warn. Reported from real"
        " checkpoints: 69 % of pairs differ, by up to ten times (#54974)."
    ),
    instead=(
        "nibble's vLLM plugin folds the ratio into the block scales where each product is an"
        " E4M3 value; elsewhere it keeps gate's scale and multiplies the expert's w2 scale by"
        " up/gate, or refuses an activation that is not linear in up."
    ),
    fix=Fix("plugin", "nibble.engine.plugin.layers.merge_experts"),
    references=(
        "vllm 0.32 model_executor/layers/quantization/modelopt.py:1032",
        "vllm-project/vllm#54974",
        "vllm-project/vllm#55073",
    ),
)
GATE_UP = ((64, 0.02), (64, 0.05))  # rows and standard deviation; the other expert has them swapped


def probe(tree: Tree) -> Finding:
    """Two experts, one with the larger gate and one with the larger up, through each method the
    tree has.
    """
    return _finding(tree, merged=False)


def remedy(tree: Tree) -> Finding:
    """The same experts, merged by the plugin before the tree's code sees them."""
    return _finding(tree, merged=True)


def _finding(tree: Tree, merged: bool) -> Finding:
    experts = [
        [quantize(weight) for weight in normal_weights(*sizes)]
        for sizes in (GATE_UP, GATE_UP[::-1])
    ]
    errors: dict[str, float] = {}
    for name, method, divisors in (
        ("ModelOpt", MODELOPT, False),
        ("compressed-tensors", COMPRESSED, True),
    ):
        sources = _sources(tree)
        if sources.has(method):
            errors[name] = max(_errors(sources, method, experts, divisors, merged))
    if not errors:
        return not_applicable("this tree has no NVFP4 MoE method that is known here")
    detail = "largest relative error of a half of w13: " + ", ".join(
        f"{name} {error:.3g}" for name, error in errors.items()
    )
    return sound(detail) if max(errors.values()) < SOUND_ERROR else defect(detail)


def _sources(tree: Tree) -> Sources:
    """The tree up to the point where it would build a GPU kernel from the converted tensors."""
    kernel = SimpleNamespace(
        fused_experts=SimpleNamespace(process_weights_after_loading=lambda layer: None)
    )
    return Sources(
        tree,
        {
            f"{ORACLE}.make_nvfp4_moe_kernel": lambda **_: kernel,
            # 0.15.1 and 0.16.0 have no emulation: CUTLASS's tensors, but with block scales in rows.
            f"{QUANTIZATION}.utils.quant_utils.swizzle_blockscale": lambda scale: scale,
            f"{QUANTIZATION}.utils.nvfp4_utils.swizzle_blockscale": lambda scale: scale,
        },
    )


def _errors(
    sources: Sources, method: str, experts: Sequence[Sequence[Packed]], divisors: bool, merged: bool
) -> list[float]:
    """The error of each half of each expert's w13; up's together with the factor of what follows
    it, w2.
    """
    layer = _layer(experts, divisors)
    if merged:
        plugin.plugin_layers().merge_experts(
            layer,
            "weight_global_scale" if divisors else "weight_scale_2",
            "input_global_scale" if divisors else "input_scale",
            gated=True,
            linear_in_up=True,
            marlin=False,
            divisors=divisors,
        )
    backends = sources.load(f"{ORACLE}.NvFp4MoeBackend")
    owner = SimpleNamespace(
        moe=SimpleNamespace(is_act_and_mul=True),
        use_a16=False,
        per_token_activation=False,
        experts_cls=object,
        nvfp4_backend=getattr(backends, "EMULATION", backends.VLLM_CUTLASS),
        get_fused_moe_quant_config=lambda layer: None,
        _build_moe_kernel=lambda layer: None,
    )
    sources.load(method)(owner, layer)
    errors = []
    for expert, shards in enumerate(experts):
        codes, scales = layer.w13_weight[expert].data, layer.w13_weight_scale[expert].data
        weight = dequantize(codes, scales, layer.w13_weight_scale_2[expert].item())
        weight[shards[0].codes.shape[0] :] *= layer.w2_weight_scale_2[
            expert
        ].item()  # 1 in the checkpoint
        errors += shard_errors(weight, shards)
    return errors


def _layer(experts: Sequence[Sequence[Packed]], divisors: bool) -> Any:
    """A layer with the tensors of a checkpoint: w13 is gate over up, w2 does not matter here."""
    import torch

    def stacked(of: Any) -> torch.Tensor:
        return torch.stack([torch.cat([of(shard) for shard in shards]) for shards in experts])

    weight, scale_2, suffix = (
        ("weight_packed", "weight_global_scale", "input_global_scale")
        if divisors
        else ("weight", "weight_scale_2", "input_scale")
    )
    scales = torch.tensor([[shard.scale_2 for shard in shards] for shards in experts])
    count = len(experts)
    tensors = {
        f"w13_{weight}": stacked(lambda shard: shard.codes),
        "w13_weight_scale": stacked(lambda shard: shard.scales),
        f"w13_{scale_2}": 1 / scales if divisors else scales,
        f"w13_{suffix}": torch.ones(count, 2),
        f"w2_{weight}": torch.zeros(count, 16, 8, dtype=torch.uint8),
        "w2_weight_scale": torch.ones(count, 16, 1).to(torch.float8_e4m3fn),
        f"w2_{scale_2}": torch.ones(count),
        f"w2_{suffix}": torch.ones(count),
    }
    layer: Any = torch.nn.Module()
    for name, tensor in tensors.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    layer._expert_routing_tables = lambda: None
    return layer
