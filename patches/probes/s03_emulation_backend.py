"""vLLM's NVFP4 emulation must multiply with the checkpoint's weight; 0.16.0 read block scales
and global scale wrongly.
"""

from __future__ import annotations

from nibble.engine.patching.probe import Finding, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="3",
    title="Garbled output of the EMULATION backend for NVFP4 linear layers",
    how="numeric: a compressed-tensors layer of the tree, through its emulation",
    expect={"0.15.1": "sound", "0.16.0": "defect", "0.32.0": "sound"},
    verdict=(
        "Real in 0.16.0 only: it reads linear block scales as swizzled ones and divides weights"
        " by a scale that is already inverted. Fixed upstream. dgx-vllm's repair guesses the"
        " direction from `scale < 1`, and calls .item() at every step."
    ),
    instead="nothing to change in 0.32.0",
    references=(
        "vllm-project/vllm#35733",
        "vllm 0.16 model_executor/layers/quantization/utils/nvfp4_utils.py:123",
    ),
)
# NVFP4's own error on normal weights is 0.095; it shows that the scales mean what
# they should.
NVFP4_ERROR = 0.12


def probe(tree: Tree) -> Finding:
    """Quantize a weight, load it into the tree's layer, and compare what it multiplies with
    against the weight.
    """
    from probes.support import dense_nvfp4
    from probes.support.nvfp4 import normal_weights, quantize, relative_error

    sources = dense_nvfp4.emulated(tree)
    if not sources.has(dense_nvfp4.COMPRESSED):
        return not_applicable("there is no compressed-tensors W4A4 NVFP4 layer in this tree")
    (weight,) = normal_weights((256, 0.02))
    method, layer = dense_nvfp4.compressed_tensors_layer(sources, [quantize(weight)], merged=False)
    error = relative_error(dense_nvfp4.multiplied_weight(method, layer), weight)
    detail = f"relative error {error:.3g} of the emulated weight (NVFP4's own: 0.095)"
    return sound(detail) if error < NVFP4_ERROR else defect(detail)
