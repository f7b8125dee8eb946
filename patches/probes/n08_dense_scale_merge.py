"""Fused ModelOpt linears with different weight_scale_2 must keep each shard's values; vLLM takes
the largest scale for all.
"""

from __future__ import annotations

from nibble.engine.patching.probe import Finding, Fix, Row, not_applicable
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="N8",
    title=(
        "Fused NVFP4 linears of ModelOpt checkpoints: the largest global scale is applied to every"
        " shard"
    ),
    how=(
        "numeric: a fused q/k/v layer of the tree, W4A4, read through its emulation with an"
        " identity"
    ),
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "defect"},
    verdict=(
        "KNvfp4Static.process takes weight_scale_2.max() and leaves the block scales: a shard is"
        " multiplied by max/own scale. It warns of reduced accuracy; the error is a gain of several"
        " times."
    ),
    instead=(
        "nibble's vLLM plugin folds the ratio into the block scales where every product is"
        " an E4M3 value, and multiplies the shard's outputs by it elsewhere."
    ),
    fix=Fix("plugin", "nibble.engine.plugin.layers.merge_layer"),
    references=(
        "vllm 0.32 model_executor/layers/quantization/modelopt.py:2062",
        "vllm-project/vllm#41769",
    ),
)


def probe(tree: Tree) -> Finding:
    """A q/k/v layer whose shards were quantized each on its own, as ModelOpt stores them."""
    from probes.support import dense_nvfp4

    if not tree.has("vllm/model_executor/layers/quantization/modelopt.py"):
        return not_applicable("there is no ModelOpt reader in this tree")
    return dense_nvfp4.merge_finding(tree, dense_nvfp4.modelopt_layer)


def remedy(tree: Tree) -> Finding:
    """The same layer, its scales merged by the plugin before the tree's code sees them."""
    from probes.support import dense_nvfp4

    return dense_nvfp4.merge_finding(tree, dense_nvfp4.modelopt_layer, merged=True)
