"""An expert's fp32 scale belongs beside its e4m3 block scales; the flashinfer_b12x experts of vLLM
0.32 multiply it into them.

Block scales then are so small that e4m3 has few bits left for them
(experts/flashinfer_b12x_moe.py:95-114). FlashInfer 0.7.0.post1 takes the scale apart
(`input_global_scale`), so that nothing needs to be multiplied in.
"""

from __future__ import annotations

from types import SimpleNamespace

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from nibble.errors import NibbleError
from probes.support.nvfp4 import Packed, dequantize, normal_weights, quantize, relative_error
from probes.support.plans import plan
from probes.support.syntax import Sources

MODULE = "vllm.model_executor.layers.fused_moe.experts.flashinfer_b12x_moe"
METHOD = f"{MODULE}.FlashInferB12xExperts.process_weights_after_loading"
RULE = "flashinfer-b12x-moe"

ROW = Row(
    id="N11",
    title="flashinfer_b12x MoE rounds fp32 scales into e4m3 block scales",
    how="numeric: the tree's own conversion of expert weights",
    expect={"0.32.0": "defect"},
    verdict=(
        "The error of a weight of standard deviation 0.02 grows from 0.095 to 0.12, of 0.005 to"
        " 0.30. vLLM never picks this backend by itself; guides for GB10 do."
    ),
    instead=(
        "No plan asks for it, and the rule flashinfer-b12x-moe refuses it for NVFP4 experts on"
        " SM12x unless the user takes the risk."
    ),
    fix=Fix("rule", f"rules/backends.toml {RULE}"),
    references=(
        "vllm 0.32 model_executor/layers/fused_moe/experts/flashinfer_b12x_moe.py:95-114",
        "vllm-project/vllm#48536",
        "flashinfer-ai/flashinfer#3932",
        "sgl-project/sglang#32119",
    ),
)
DEVIATIONS = (0.02, 0.01, 0.005)
GROWTH = 1.05  # of the weights' error; NVFP4's own is 0.095


def probe(tree: Tree) -> Finding:
    """Convert experts of three standard deviations and compare what they then stand for with the
    weights.
    """
    if not tree.has(f"{MODULE.replace('.', '/')}.py"):
        return not_applicable("no flashinfer_b12x experts")
    weights = normal_weights(*((64, deviation) for deviation in DEVIATIONS))
    packed = [quantize(weight) for weight in weights]
    before = [
        relative_error(one.values, weight) for one, weight in zip(packed, weights, strict=True)
    ]
    after = [
        relative_error(values, weight)
        for values, weight in zip(_converted(tree, packed), weights, strict=True)
    ]
    pairs = zip(DEVIATIONS, before, after, strict=True)
    detail = "error of the weights " + ", ".join(
        f"{b:.3f} -> {a:.3f} (sigma {s})" for s, b, a in pairs
    )
    grows = any(a > GROWTH * b for b, a in zip(before, after, strict=True))
    return defect(detail) if grows else sound(detail)


def remedy(tree: Tree) -> Finding:
    """Whether a plan for SM12x ever has the backend, asked for or not."""
    for target in ("sm120", "gb10"):
        chosen = plan(target).args.get("--moe-backend")
        if chosen and "b12x" in str(chosen.value):
            return defect(f"the plan for {target} chooses {chosen.value}")
        try:
            plan(target, "--moe-backend", "flashinfer_b12x")
        except NibbleError as error:
            if RULE not in error.line():
                return defect(f"refused for another reason: {error.line()}")
        else:
            return defect(f"the plan for {target} takes flashinfer_b12x without a notice")
    return sound(f"no plan for sm120 or gb10 has it; asked for, it is refused by the rule {RULE}")


def _converted(tree: Tree, experts: list[Packed]) -> list:
    """What the experts stand for after the tree's conversion; FlashInfer's order of the scales
    is left out.
    """
    import torch

    sources = Sources(
        tree, {f"{MODULE}.flashinfer_convert_sf_to_mma_layout": lambda scales, **_: scales}
    )

    def parameter(tensor):
        return torch.nn.Parameter(tensor.clone(), requires_grad=False)

    scales = torch.stack([expert.scales for expert in experts])
    scales_2 = torch.tensor([expert.scale_2 for expert in experts])
    layer = SimpleNamespace(w13_weight=torch.stack([expert.codes for expert in experts]))
    for part in ("w13", "w2"):
        setattr(layer, f"{part}_weight_scale", parameter(scales))
        setattr(layer, f"{part}_weight_scale_2", parameter(scales_2))
    owner = SimpleNamespace(
        a2_gscale=None,
        num_local_experts=len(experts),
        w1_scale=layer.w13_weight_scale,
        w2_scale=layer.w2_weight_scale,
    )
    sources.load(METHOD)(owner, layer)
    return [
        dequantize(expert.codes, layer.w13_weight_scale[i], layer.w13_weight_scale_2[i].item())
        for i, expert in enumerate(experts)
    ]
