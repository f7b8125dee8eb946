"""config.json may name unquantized modules under `exclude_modules` as well as `ignore`;
modelopt.py reads the latter only.
"""

from __future__ import annotations

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support.syntax import Sources

ROW = Row(
    id="N15",
    title="The key exclude_modules of config.json is not read: nothing is excluded",
    how="numeric: the tree's own from_config and is_layer_excluded",
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "defect"},
    verdict=(
        "Layers that the checkpoint keeps in BF16 are built for NVFP4: loading fails on their"
        " shapes, or on a scale that is never loaded. vLLM 0.33.0 reads both keys."
    ),
    instead="the change of 0.33.0",
    fix=Fix("patch", "vllm/modelopt-exclude-modules-key"),
    references=(
        "vllm 0.32 model_executor/layers/quantization/modelopt.py:355",
        "vllm 0.33 model_executor/layers/quantization/modelopt.py:359",
        "vllm-project/vllm#25706",
    ),
)
CONFIG = "vllm.model_executor.layers.quantization.modelopt.ModelOptNvFp4Config"


def probe(tree: Tree) -> Finding:
    """Read the same list under each key."""
    sources = Sources(tree)
    if not sources.has(CONFIG):
        return not_applicable("there is no ModelOptNvFp4Config in this tree")
    read = sources.load(CONFIG).from_config
    excluded = {}
    for key in ("ignore", "exclude_modules"):
        config = read({"quant_method": "modelopt", "quant_algo": "NVFP4", key: ["lm_head"]})
        excluded[key] = config.is_layer_excluded("lm_head")
    detail = "lm_head excluded: " + ", ".join(f"{key} {value}" for key, value in excluded.items())
    return sound(detail) if all(excluded.values()) else defect(detail)
