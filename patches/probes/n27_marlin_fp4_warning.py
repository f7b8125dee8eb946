"""`Your GPU does not have native support for FP4` must not be logged on a Blackwell GPU; Marlin
layers log it on every GPU.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from types import SimpleNamespace

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support.messages import Messages
from probes.support.syntax import Sources

ROW = Row(
    id="N27",
    title=(
        "`Your GPU does not have native support for FP4` on Blackwell, for every weight-only layer"
    ),
    how=(
        "fake platform: the tree's own functions for a Marlin layer, and what they log on SM90,"
        " SM100, SM120 and SM121"
    ),
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "defect"},
    verdict=(
        "The claim about the GPU is false there: Marlin is chosen because the checkpoint is"
        " weight-only, or by a flag. Users read it as missing hardware support and file it as such."
    ),
    instead="the message is logged below compute capability 10.0 only, where it is true",
    fix=Fix("patch", "vllm/marlin-fp4-warning"),
    references=(
        "vllm 0.32 model_executor/kernels/linear/nvfp4/marlin.py:35",
        "vllm 0.32 model_executor/layers/quantization/utils/marlin_utils_fp4.py:341",
        "vllm-project/vllm#47749",
        "vllm-project/vllm#48199",
        "vllm-project/vllm#45192",
    ),
)
MARLIN = "vllm.model_executor.layers.quantization.utils.marlin_utils_fp4"
KERNEL = "vllm.model_executor.kernels.linear.nvfp4.marlin.MarlinNvFp4LinearKernel"
# Where the weights of a layer are prepared: the first that a tree has.
PREPARE = {
    "linear": (f"{KERNEL}.process_weights_after_loading", f"{MARLIN}.prepare_fp4_layer_for_marlin"),
    "MoE": (f"{MARLIN}.prepare_nvfp4_moe_layer_for_marlin",),
}
CAPABILITIES = {"SM90": 90, "SM100": 100, "SM120": 120, "SM121": 121}


def probe(tree: Tree) -> Finding:
    """Prepare a dense and an MoE layer on each GPU and see which of them log the message."""
    logged = []
    for kind, names in PREPARE.items():
        found = next((name for name in names if Sources(tree).has(name)), None)
        if found is None:
            return not_applicable(f"there is no Marlin {kind} layer in this tree")
        logged += [
            f"{kind} {gpu}" for gpu, number in CAPABILITIES.items() if _logs(tree, found, number)
        ]
    detail = f"logged for: {', '.join(logged) or 'none'}"
    if any("SM90" not in name for name in logged):
        return defect(detail)
    if len(logged) < len(PREPARE):
        return not_applicable(
            f"{detail}; on SM90 it is true, so it is gone or comes from elsewhere"
        )
    return sound(detail)


def _logs(tree: Tree, name: str, capability: int) -> bool:
    """Whether preparing a layer on this GPU logs the message."""
    messages = Messages()
    given = {
        "vllm.platforms.current_platform": SimpleNamespace(
            has_device_capability=lambda least: capability >= least, is_cuda=lambda: True
        ),
        f"{MARLIN}.get_marlin_input_dtype": lambda prefix: None,
    }
    prepare = Sources(tree, messages.given | given).load(name)
    # The message comes before the first look at the layer, which ends it here: repacking weights
    # takes a GPU.
    with suppress(AttributeError):
        prepare(*[object()] * len(inspect.signature(prepare).parameters))
    return any("native support for FP4" in message for message in messages)
