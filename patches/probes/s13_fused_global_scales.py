"""Fused W4A16 linears with different weight_scale_2 must keep each shard's values: the same
merge as N8, on glm47-nvfp4-sm120's path.
"""

from __future__ import annotations

from nibble.engine.patching.probe import Finding, Fix, Row, not_applicable
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="13",
    title=(
        "ModelOpt NVFP4 W4A16: global scales of fused layers are merged by max() without rescaling"
    ),
    how=(
        "numeric: a fused q/k/v layer of the tree, W4A16 (W4A4 in releases before W4A16), its"
        " tensors dequantized"
    ),
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "defect"},
    verdict=(
        "The merge takes the largest scale and leaves the block scales of the other parts. W4A4"
        " and W4A16 share the code (N8)."
    ),
    instead=(
        "nibble's vLLM plugin folds the ratio into the block scales where every product is"
        " an E4M3 value, and multiplies the shard's outputs by it elsewhere."
    ),
    fix=Fix("plugin", "nibble.engine.plugin.layers.merge_layer"),
    references=(
        "vllm-project/vllm#41769",
        "vllm 0.32 model_executor/layers/quantization/modelopt.py:2062",
    ),
)


def probe(tree: Tree) -> Finding:
    """As N8, with no activation scales: what the Marlin kernel of W4A16 would be given."""
    from probes.support import dense_nvfp4

    if not tree.has("vllm/model_executor/layers/quantization/modelopt.py"):
        return not_applicable("there is no ModelOpt reader in this tree")
    return dense_nvfp4.merge_finding(tree, dense_nvfp4.modelopt_w4a16_layer, emulate=False)


def remedy(tree: Tree) -> Finding:
    """The same layer, its scales merged by the plugin before the tree's code sees them."""
    from probes.support import dense_nvfp4

    return dense_nvfp4.merge_finding(
        tree, dense_nvfp4.modelopt_w4a16_layer, emulate=False, merged=True
    )
