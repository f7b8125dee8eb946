"""A GB10 has a tuned Triton configuration for 512 FP8 experts of width 512, as dgx-vllm's file adds
one; NVFP4 experts need none.

vLLM 0.15.1 and 0.16.0 have none for GB10, 0.32.0 has one for block scales (128 x 128) and none for
per-tensor scales, which is what dgx-vllm's JSON is for. vLLM takes a user's file from
VLLM_TUNED_CONFIG_FOLDER, without a change in site-packages.
"""

from __future__ import annotations

import ast
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support.syntax import Sources, find, parse

LOADER = "vllm.model_executor.layers.fused_moe.fused_moe.get_moe_configs"
ORACLE = "vllm/model_executor/layers/fused_moe/oracle/nvfp4.py"
READERS = {"get_moe_configs", "try_get_optimal_moe_config"}
TUNED_FILE = "E=512,N=512,device_name=NVIDIA_GB10,dtype=fp8_w8a8.json"

ROW = Row(
    id="12",
    title="no tuned MoE configuration for E=512, N=512 on GB10",
    how="the tree's own loader, asked as GB10; AST of the NVFP4 experts",
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "defect"},
    verdict=(
        "True for per-tensor FP8 and a matter of speed only; 0.32.0 ships the one for block FP8."
        " Nothing to do with NVFP4: of its expert kernels only the emulation reads such files, as"
        " BF16."
    ),
    instead=(
        "no file is added to vLLM: nibble sets VLLM_TUNED_CONFIG_FOLDER to its own data for GB10"
        " (targets/moe), reasoned from vLLM's tiles for 256 experts of 512, and passes a user's"
        " folder on. dgx-vllm's +65.7 % is not measured here, and neither are these."
    ),
    fix=Fix("environment", "VLLM_TUNED_CONFIG_FOLDER, targets/moe/NVIDIA_GB10"),
    references=(
        "vllm 0.32 model_executor/layers/fused_moe/fused_moe.py:1133-1144",
        "Avarok-Cybersecurity/dgx-vllm ead7ae7 E=512,N=512 JSON",
    ),
)


def probe(tree: Tree) -> Finding:
    """Ask as GB10 for per-tensor and block FP8, and look at which NVFP4 experts read such files
    at all.
    """
    if not tree.path(LOADER.rpartition(".")[0].replace(".", "/") + ".py").is_file():
        return not_applicable("no Triton MoE loader")
    tensor, block = _ask(tree, None, 0, 0), _ask(tree, None, 128, 128)
    readers = _nvfp4_readers(tree)
    shown = {True: "found", False: "none"}
    detail = (
        f"per-tensor FP8: {shown[tensor]}, block FP8: {shown[block]}; NVFP4 experts that read"
        f" files: {readers or 'none'}"
    )
    return sound(detail) if tensor and block else defect(detail)


def remedy(tree: Tree) -> Finding:
    """The same with a user's folder that holds a file of dgx-vllm's name."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, TUNED_FILE).write_text(
            json.dumps({"triton_version": "3.5.0", "1": {"BLOCK_SIZE_M": 16}})
        )
        found = _ask(tree, folder, 0, 0)
    return (
        sound(f"{TUNED_FILE} is read from the user's folder")
        if found
        else defect("the user's file is not read")
    )


def _ask(tree: Tree, folder: str | None, rows: int, columns: int) -> bool:
    given: dict[str, Any] = {
        "vllm.envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False, VLLM_TUNED_CONFIG_FOLDER=folder),
        "vllm.platforms.current_platform": SimpleNamespace(
            get_device_name=lambda device_id=0: "NVIDIA GB10"
        ),
        "vllm.model_executor.layers.batch_invariant.vllm_is_batch_invariant": lambda: False,
    }
    return bool(Sources(tree, given).load(LOADER)(512, 512, "fp8_w8a8", rows, columns))


def _nvfp4_readers(tree: Tree) -> str:
    """Modules of NVFP4 expert kernels that name the loader; 'unknown' where the tree has no
    table of them.
    """
    table = find(parse(tree.path(ORACLE)), "backend_to_kernel_cls") if tree.has(ORACLE) else None
    if table is None:
        return "unknown"
    modules = {
        node.module for node in ast.walk(table) if isinstance(node, ast.ImportFrom) and node.module
    }
    paths = [tree.path(module.replace(".", "/") + ".py") for module in modules]
    return ", ".join(
        sorted(path.stem for path in paths if path.is_file() and READERS & _names(path))
    )


def _names(path: Path) -> set[str]:
    return {node.id for node in ast.walk(parse(path)) if isinstance(node, ast.Name)}
