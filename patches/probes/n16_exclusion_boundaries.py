"""The name of an unquantized module must match whole components of a layer's name; modelopt.py
looks for it as a substring.
"""

from __future__ import annotations

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support.syntax import Sources

ROW = Row(
    id="N16",
    title="Excluding model.layers.1 also excludes the layers 10 to 19",
    how="numeric: the tree's own from_config and is_layer_excluded over the names of a model",
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "defect"},
    verdict=(
        "ModelOpt writes a module's plain name exactly where the glob `name*` would cover quantized"
        " modules too, so a substring is the one reading it rules out. The quantized layers that"
        " match are built for BF16 and fail to load."
    ),
    instead=(
        "names match at dots, in the layer's name and in those of the projections fused in it;"
        " globs stay globs"
    ),
    fix=Fix("patch", "vllm/modelopt-exclusion-boundaries"),
    references=(
        "vllm 0.32 model_executor/layers/quantization/modelopt.py:206",
        (
            "NVIDIA/Model-Optimizer modelopt/torch/export/quant_utils.py"
            " _prefix_wildcard_summarize_exclude_modules"
        ),
    ),
)
CONFIG = "vllm.model_executor.layers.quantization.modelopt.ModelOptNvFp4Config"
EXCLUDED = ["lm_head", "model.layers.1", "model.layers.1.*", "model.layers.0.mlp.gate"]


def probe(tree: Tree) -> Finding:
    """A model of 20 layers, of which layer 1 and the router of layer 0 are not quantized."""
    sources = Sources(tree)
    if not sources.has(CONFIG):
        return not_applicable("there is no ModelOptNvFp4Config in this tree")
    config = sources.load(CONFIG).from_config(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": EXCLUDED}
    )
    wanted = {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.down_proj"}
    names = (
        wanted
        | {f"model.layers.{i}.mlp.down_proj" for i in range(20)}
        | {"model.layers.0.mlp.gate_up_proj"}
    )
    excluded = {name for name in names if config.is_layer_excluded(name)}
    if missing := sorted(wanted - excluded):
        return defect(f"not excluded: {', '.join(missing)}")
    if wrong := sorted(excluded - wanted):
        return defect(f"{len(wrong)} quantized layers excluded: {', '.join(wrong[:3])}, …")
    return sound(f"of {len(names)} layers exactly {', '.join(sorted(wanted))} are excluded")
