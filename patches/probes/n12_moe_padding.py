"""Gated NVFP4 experts of any size must load on the CUTLASS backends; flashinfer_fp4_moe.py pads
ungated ones only.
"""

from __future__ import annotations

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support import padded_moe
from probes.support.syntax import Sources

ROW = Row(
    id="N12",
    title="NotImplementedError while a gated NVFP4 MoE loads whose 2·I/TP is not a multiple of 128",
    how=(
        "numeric: the tree's own preparation of the experts for both CUTLASS backends, and what the"
        " result computes"
    ),
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "defect"},
    verdict=(
        "True for VLLM_CUTLASS and FLASHINFER_CUTLASS, which SM12x takes for W4A4; their choice"
        " does not look at the intermediate size. The block-scale layout has 128 rows; the path for"
        " TRTLLM pads gate and up to 64 each with a function that this path does not call."
    ),
    instead=(
        "gate and up are padded with zeros by that function first; the result is the same to the"
        " last bits of float64"
    ),
    fix=Fix("patch", "vllm/moe-gated-padding"),
    references=(
        "vllm 0.32 model_executor/layers/quantization/utils/flashinfer_fp4_moe.py:437-452",
        "vllm 0.32 model_executor/layers/fused_moe/modular_kernel.py:583",
        "vllm-project/vllm#57125",
        "vllm-project/vllm#57351",
        "vllm-project/vllm#48624",
    ),
)
UNEVEN, EVEN = (96, 176, 352), (192, 704, 768)
TOLERANCE = 1e-12  # float64 sums in another order


def probe(tree: Tree) -> Finding:
    """Experts of sizes that need padding and of sizes that do not, for each backend."""
    sources = Sources(tree)
    if not sources.has(padded_moe.PREPARE):
        return not_applicable("there is no prepare_nvfp4_moe_layer_for_fi_or_cutlass in this tree")
    refused, errors = [], []
    for backend in ("VLLM_CUTLASS", "FLASHINFER_CUTLASS"):
        for size in UNEVEN + EVEN:
            experts = padded_moe.Experts.of(size)
            try:
                prepared = padded_moe.prepare(sources, backend, experts)
            except NotImplementedError:
                refused.append(f"{backend} {size}")
                continue
            if size in EVEN and prepared.intermediate != size:
                return defect(
                    f"{backend}: I={size} was padded to {prepared.intermediate} without need"
                )
            if prepared.w2.shape[-1] * 2 != prepared.intermediate:
                return defect(
                    f"{backend}: w2 has {prepared.w2.shape[-1] * 2} columns, the layer says"
                    f" {prepared.intermediate}"
                )
            difference = padded_moe.output(prepared, experts) - padded_moe.expected_output(experts)
            errors.append(difference.abs().max().item())
    if refused:
        return defect(f"NotImplementedError for {', '.join(refused)}; {len(errors)} others load")
    detail = (
        f"I = {', '.join(map(str, UNEVEN + EVEN))} load on both; largest difference of the output"
        f" {max(errors):.1e}"
    )
    return sound(detail) if max(errors) < TOLERANCE else defect(detail)
