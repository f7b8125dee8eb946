"""Fused ModelOpt linears with different weight_scale_2 must keep each shard's values; vLLM takes the largest scale for all."""

from __future__ import annotations

from nibble.patching.probe import Finding, Row, not_applicable
from nibble.patching.tree import Tree

ROW = Row(
    id="N8",
    title="Fused NVFP4 linears of ModelOpt checkpoints: the largest global scale is applied to every shard",
    how="numeric: a fused q/k/v layer of the tree, W4A4, read through its emulation with an identity",
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "defect"},
    verdict="KNvfp4Static.process takes weight_scale_2.max() and leaves the block scales: a shard is multiplied by max/own "
    "scale. It warns of reduced accuracy; the error is a gain of several times.",
    instead="not mended yet: issue 4 folds the ratio into the block scales",
    references=("vllm 0.32 model_executor/layers/quantization/modelopt.py:2062", "vllm-project/vllm#41769"),
)


def probe(tree: Tree) -> Finding:
    """A q/k/v layer whose shards were quantized each on its own, as ModelOpt stores them."""
    from probes.support import dense_nvfp4

    if not tree.has("vllm/model_executor/layers/quantization/modelopt.py"):
        return not_applicable("there is no ModelOpt reader in this tree")
    return dense_nvfp4.merge_finding(tree, dense_nvfp4.modelopt_layer)
