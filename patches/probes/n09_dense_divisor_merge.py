"""Fused compressed-tensors linears with different global scales must keep each shard's values;
vLLM takes the largest divisor.
"""

from __future__ import annotations

from nibble.engine.patching.probe import Finding, Fix, Row, not_applicable
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="N9",
    title=(
        "Fused NVFP4 linears of compressed-tensors checkpoints: the smallest scale is applied to"
        " every shard"
    ),
    how=(
        "numeric: a fused q/k/v layer of the tree, W4A4, read through its emulation with an"
        " identity"
    ),
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "defect"},
    verdict=(
        "The scheme takes weight_global_scale.max(), and these are divisors: every shard but the"
        " one of the smallest values shrinks."
    ),
    instead=(
        "nibble's vLLM plugin folds the ratio into the block scales where every product is"
        " an E4M3 value, and multiplies the shard's outputs by it elsewhere."
    ),
    fix=Fix("plugin", "nibble.engine.plugin.layers.merge_layer"),
    references=(
        (
            "vllm 0.32"
            " model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py:111"  # noqa: E501
        ),
        "vllm-project/vllm#47515",
    ),
)


def probe(tree: Tree) -> Finding:
    """A q/k/v layer whose shards were quantized each on its own, as compressed-tensors stores
    them.
    """
    from probes.support import dense_nvfp4

    if not tree.has("vllm/model_executor/layers/quantization/compressed_tensors"):
        return not_applicable("there is no compressed-tensors reader in this tree")
    return dense_nvfp4.merge_finding(tree, dense_nvfp4.compressed_tensors_layer)


def remedy(tree: Tree) -> Finding:
    """The same layer, its scales merged by the plugin before the tree's code sees them."""
    from probes.support import dense_nvfp4

    return dense_nvfp4.merge_finding(tree, dense_nvfp4.compressed_tensors_layer, merged=True)
