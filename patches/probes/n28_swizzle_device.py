"""Swizzled block scales must stay on the device of the scales; swizzle_blockscale moves them to
the GPU in any case.
"""

from __future__ import annotations

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support.syntax import Sources

ROW = Row(
    id="N28",
    title="swizzle_blockscale calls .cuda() unconditionally",
    how="numeric: the tree's own function on the CPU, compared with the layout's formula",
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "defect"},
    verdict=(
        "True: without a GPU it raises, and with one it returns a tensor on the current device"
        " instead of the scale's own."
    ),
    instead="the call is dropped; at load the scales are on the GPU already, where it did nothing",
    fix=Fix("patch", "vllm/swizzle-keeps-device"),
    references=("vllm 0.32 model_executor/layers/quantization/utils/nvfp4_utils.py:46",),
)
UTILS = "vllm.model_executor.layers.quantization.utils"


def probe(tree: Tree) -> Finding:
    """Swizzle 130 x 6 scales on the CPU: both sizes are padded."""
    import torch

    sources = Sources(tree)
    names = [f"{UTILS}.{file}.swizzle_blockscale" for file in ("nvfp4_utils", "quant_utils")]
    name = next((name for name in names if sources.has(name)), None)
    if name is None:
        return not_applicable("there is no swizzle_blockscale in this tree")
    rows, columns = 130, 6
    scales = (torch.arange(rows * columns) % 100 / 8).reshape(rows, columns).to(torch.float8_e4m3fn)
    try:
        swizzled = sources.load(name)(scales)
    except (AssertionError, RuntimeError) as error:  # torch without CUDA, or without a GPU
        return defect(f"{type(error).__name__} for a tensor on the CPU: {error}")
    if swizzled.device.type != "cpu":
        return defect(f"a tensor on the CPU comes back on {swizzled.device}")
    if not torch.equal(swizzled.float(), _swizzled(scales).float()):
        return defect("the swizzled scales are not in the 128x4 layout")
    return sound(f"{rows} x {columns} scales stay on the CPU, in the 128x4 layout")


def _swizzled(scales):
    """The offset of the scale of row r and block b (CUTLASS's 128x4 tiles)."""
    import torch

    rows, columns = scales.shape
    tiles = -(-columns // 4)
    flat = torch.zeros(-(-rows // 128) * tiles * 512, dtype=torch.uint8)
    r, b = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    flat[(r // 128 * tiles + b // 4) * 512 + r % 32 * 16 + r // 32 % 4 * 4 + b % 4] = scales.view(
        torch.uint8
    )
    return flat.view(torch.float8_e4m3fn).reshape(-1, tiles * 4)
