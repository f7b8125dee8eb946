"""A draft layer that is BF16 in the file is built unquantized, though the exporter's list of
exclusions misses it.

ModelOpt writes `mtp.layers.0*` for an MTP head whose `mtp.fc` is BF16 too (unified_export_hf.py
_add_mtp_exclusions). vLLM
0.15.1 and 0.16.0 build Qwen3-Next's mtp.fc by that list as NVFP4; 0.32.0 builds it unquantized by
name for two models and
modelopt_fp4 alone. Other MTP models and compressed-tensors still ask the list.
"""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

from nibble.checkpoint.exclusions import correct, read_modules
from nibble.checkpoint.headers import TensorInfo
from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support.syntax import Sources, parse

MODELOPT = "vllm.model_executor.layers.quantization.modelopt.ModelOptQuantConfigBase"
OVERRIDES = "vllm.config.model.ModelConfig._apply_dict_overrides"
EXPORTED = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head", "mtp.layers.0*"],
}

ROW = Row(
    id="9",
    title="MTP head of NVFP4 checkpoints: mtp.fc is BF16 and not excluded",
    how="the tree's own is_layer_excluded, AST of the MTP models, a checkpoint's headers",
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "defect"},
    verdict=(
        "True, and the cause is the exporter's list. 0.32.0 builds mtp.fc of Qwen3-Next and Qwen3.5"
        " unquantized by name; EXAONE and LongCat, GLM's whole MTP layer and compressed-tensors"
        " depend on the list."
    ),
    instead=(
        "nibble compares the list with the tensors' types before the start and, where they"
        " disagree, gives vLLM one that agrees in --hf-overrides; without readable headers nothing"
        " is changed. nibble's plugin loads an NVFP4 mtp.fc of Qwen3-Next and Qwen3.5; MTP is"
        " refused for drafts that read config.json again (Nemotron-H, Step-3.5)."
    ),
    fix=Fix("flag", "--hf-overrides, nibble/plan/quantized_layers.py"),
    references=(
        "vllm-project/vllm#38832",
        "vllm-project/vllm#35031",
        "NVIDIA/Model-Optimizer#750",
        "vllm 0.32 model_executor/layers/quantization/modelopt.py:190",
        "vllm 0.32 model_executor/models/exaone_moe_mtp.py:69",
    ),
)


def probe(tree: Tree) -> Finding:
    """What vLLM makes of a checkpoint with a BF16 MTP head and the exporter's list, and which
    models ask the list.
    """
    if not Sources(tree).has(f"{MODELOPT}.is_layer_excluded"):
        return not_applicable("no ModelOpt exclusions")
    wrong = [name for name in _modules().plain if not _is_excluded(tree, EXPORTED, name)]
    asking = _models_that_ask(tree)
    detail = (
        f"built as NVFP4 though BF16: {', '.join(sorted(wrong)) or 'none'}; asked for by"
        f" {', '.join(asking) or 'no model'}"
    )
    return defect(detail) if wrong and asking else sound(detail)


def remedy(tree: Tree) -> Finding:
    """The same with nibble's override, put into the config by vLLM and read again by its parser."""
    correction = correct(_modules(), with_draft=True)
    if correction is None:
        return defect("nibble sees nothing to correct")
    config = SimpleNamespace(quantization_config=EXPORTED)
    given = {"quantization_config": dict(correction.config)}
    Sources(tree).load(OVERRIDES)(SimpleNamespace(), config, given)
    modules, declared = _modules(), config.quantization_config
    wrong = [name for name in modules.plain if not _is_excluded(tree, declared, name)]
    wrong += [name for name in modules.quantized if _is_excluded(tree, declared, name)]
    detail = f"ignore = {correction.config['ignore']}"
    return (
        defect(f"{detail}: still wrong about {', '.join(sorted(wrong))}")
        if wrong
        else sound(detail)
    )


def _modules() -> Any:
    """A layer and an MTP head as an NVFP4 export has them."""
    packed = [
        ("model.layers.0.mlp.down_proj.weight", "U8"),
        ("model.layers.0.mlp.down_proj.weight_scale", "F8_E4M3"),
    ]
    names = ("lm_head", "mtp.fc", "mtp.layers.0.mlp.down_proj", "mtp.layers.0.self_attn.q_proj")
    tensors = [*packed, *((f"{name}.weight", "BF16") for name in names)]
    infos = {name: TensorInfo(name, dtype, (64, 64), 0) for name, dtype in tensors}
    modules = read_modules(
        {"model_type": "exaone_moe", "quantization_config": EXPORTED}, None, infos, 1
    )
    assert modules is not None
    return modules


def _is_excluded(tree: Tree, declared: dict[str, Any], name: str) -> bool:
    """vLLM's parser of the config, then its question about one layer."""
    sources = Sources(tree)
    cls = SimpleNamespace(_from_config=lambda **parsed: parsed)
    parsed = sources.load(f"{MODELOPT}.from_config")(cls, dict(declared))
    config = SimpleNamespace(exclude_modules=parsed["exclude_modules"], packed_modules_mapping={})
    return sources.load(f"{MODELOPT}.is_layer_excluded")(config, name)


def _models_that_ask(tree: Tree) -> list[str]:
    """MTP models that give the quantization config to the layer joining embedding and hidden
    state, whatever it is.
    """
    asking = []
    for path in sorted(tree.path("vllm/model_executor/models").glob("*mtp*.py")):
        for node in ast.walk(parse(path)):
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
                continue
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.value.keywords}
            if (
                ast.unparse(node.targets[0]) in ("self.fc", "self.eh_proj")
                and given.get("quant_config") == "quant_config"
            ):
                asking.append(path.stem)
    return sorted(set(asking))
