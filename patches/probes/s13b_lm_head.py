"""A quantized lm_head can be loaded only where the model passes quant_config to ParallelLMHead."""

from __future__ import annotations

import ast
import tempfile

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support.syntax import find, parse, python_files

MODELOPT = "vllm/model_executor/layers/quantization/modelopt.py"
ROW = Row(
    id="13b",
    title="NVFP4 lm_head cannot be loaded",
    how=(
        "AST: calls of ParallelLMHead without quant_config, and whether the ModelOpt reader knows"
        " the class"
    ),
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "defect"},
    verdict=(
        "The ModelOpt reader of 0.32.0 handles ParallelLMHead; a model that does not pass"
        " quant_config still builds a plain head, and its loader stops at lm_head.weight_scale."
    ),
    instead=(
        "nibble's vLLM plugin puts a subclass in ParallelLMHead's place (vLLM's"
        " register_oot) that takes the model's own quantization config where a model class passes"
        " none; the checkpoint's ignore list decides about the head."
    ),
    fix=Fix("plugin", "nibble.engine.plugin.lm_head.register_head"),
    references=("vllm-project/vllm#45102", "vllm 0.32 model_executor/models/qwen3_next.py:851"),
)


def probe(tree: Tree) -> Finding:
    """Count the constructor calls in the tree's models."""
    if not tree.has(MODELOPT):
        return not_applicable("there is no ModelOpt reader in this tree")
    calls, without = 0, []
    for path in python_files(tree.root, "vllm"):
        source = path.read_text(encoding="utf-8")
        if "ParallelLMHead(" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Call(func=ast.Name(id="ParallelLMHead"), keywords=keywords):
                    calls += 1
                    if all(keyword.arg != "quant_config" for keyword in keywords):
                        name = path.stem if path.stem != "model" else "/".join(path.parts[-3:-1])
                        without.append(name)
    knows = "reads" if _reader_knows_the_head(tree) else "does not read"
    detail = (
        f"ModelOpt {knows} ParallelLMHead; {len(without)} of {calls} calls pass no quant_config"
    )
    if without:
        return defect(f"{detail}: {', '.join(sorted(set(without)))}")
    return sound(detail) if knows == "reads" else defect(detail)


def remedy(tree: Tree) -> Finding:
    """A head made as those models make it, in a model whose checkpoint quantizes it, once
    nibble's plugin is in place.
    """
    from probes.support import plugin

    try:
        plugin.become_cpu()
        plugin.find_nibble_kernels()
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.model_executor.layers.quantization import modelopt
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        from nibble.engine.plugin import kernels, lm_head
    except ImportError as error:
        return not_applicable(f"the plugin is not made for this release: {error}")

    modelopt.init_nvfp4_linear_kernel = kernels.nvfp4_linear_kernel
    lm_head.register_head()
    config = VllmConfig()
    config.quant_config = modelopt.ModelOptNvFp4Config("W4A16_NVFP4", True, None, [], 16)
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1)
        head = ParallelLMHead(256, 128)
    names = sorted(name for name, _ in head.named_parameters())
    detail = f"a head made without quant_config has the tensors {', '.join(names)}"
    return sound(detail) if "weight_scale_2" in names else defect(detail)


def _reader_knows_the_head(tree: Tree) -> bool:
    """Whether get_quant_method of the ModelOpt configurations names the class."""
    method = find(parse(tree.path(MODELOPT)), "ModelOptQuantConfigBase.get_quant_method")
    return method is not None and any(
        isinstance(n, ast.Name) and n.id == "ParallelLMHead" for n in ast.walk(method)
    )
