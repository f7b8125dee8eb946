"""A checkpoint that says null for its list of unquantized modules excludes none; modelopt.py
refuses it at start.
"""

from __future__ import annotations

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support.syntax import Sources

ROW = Row(
    id="13c",
    title="ValueError for a ModelOpt checkpoint with `exclude_modules: null` or `ignore: null`",
    how="numeric: the tree's own from_config over both files a checkpoint may have",
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "defect"},
    verdict=(
        "True of every release seen. The class itself takes None for an empty list"
        " (modelopt.py:738); only the reader of the JSON refuses it."
    ),
    instead="null is read as an empty list",
    fix=Fix("patch", "vllm/modelopt-null-exclusions"),
    references=("vllm 0.32 model_executor/layers/quantization/modelopt.py:375",),
)
CONFIG = "vllm.model_executor.layers.quantization.modelopt.ModelOptNvFp4Config"
FILES = {
    "hf_quant_config.json": {
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": None,
        }
    },
    "config.json": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": None},
}


def probe(tree: Tree) -> Finding:
    """Read each file with null in place of the list."""
    sources = Sources(tree)
    if not sources.has(CONFIG):
        return not_applicable("there is no ModelOptNvFp4Config in this tree")
    read = sources.load(CONFIG).from_config
    found = {}
    for name, config in FILES.items():
        try:
            found[name] = read(config).exclude_modules
        except ValueError as error:
            return defect(f"{name}: ValueError: {error}")
    detail = ", ".join(f"{name}: {excluded}" for name, excluded in found.items())
    return sound(detail) if all(excluded == [] for excluded in found.values()) else defect(detail)
