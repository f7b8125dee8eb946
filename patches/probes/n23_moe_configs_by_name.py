"""A GPU finds the tuned Triton MoE configurations that were made for its number of SMs.

vLLM 0.32 looks a file up by the exact product name
(model_executor/layers/fused_moe/fused_moe.py:1093-1144), so that a card whose sibling was tuned
gets none. What is missing is speed: the kernels' general defaults are correct.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from nibble.machine.targets import load_target
from nibble.plan.moe_tuning import TunedConfigs, find_alias, make_folder
from probes.support.syntax import Sources

LOADER = "vllm.model_executor.layers.fused_moe.fused_moe.get_moe_configs"
FOLDER = "vllm/model_executor/layers/fused_moe/configs"
RTX_PRO = "NVIDIA RTX PRO 6000 Blackwell"
UNTUNED = (f"{RTX_PRO} Max-Q Workstation Edition", "NVIDIA GeForce RTX 5090")
TUNED = (f"{RTX_PRO} Workstation Edition", f"{RTX_PRO} Server Edition")

ROW = Row(
    id="N23",
    title="RTX 5090 and RTX PRO 6000 Max-Q have no tuned Triton MoE configuration",
    how="the tree's own loader, asked under each card's name",
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "defect"},
    verdict=(
        "The files are chosen by product name. Experts that run in Triton read them (BF16, FP8,"
        " INT8); NVFP4 experts run in CUTLASS, FlashInfer, b12x, Humming or Marlin and read none."
    ),
    instead=(
        "For a MoE model that is not all NVFP4, `nibble serve` links the files of the card of the"
        " same capability with the nearest SM count under this GPU's name and sets"
        " VLLM_TUNED_CONFIG_FOLDER, unless the user did. Unmeasured."
    ),
    fix=Fix("environment", "VLLM_TUNED_CONFIG_FOLDER, nibble/plan/moe_tuning.py"),
    references=("vllm 0.32 model_executor/layers/fused_moe/fused_moe.py:1093-1144",),
)


def probe(tree: Tree) -> Finding:
    """As each card, ask vLLM's loader for every shape that any GPU has a file for."""
    if not tree.has(FOLDER):
        return not_applicable(f"no {FOLDER}")
    found = {card: configurations(tree, card) for card in (*UNTUNED, *TUNED)}
    if not any(found[card] for card in TUNED):
        return not_applicable("no file for any RTX PRO 6000")
    detail = ", ".join(f"{card.removeprefix('NVIDIA ')}: {count}" for card, count in found.items())
    return sound(detail) if all(found[card] for card in UNTUNED) else defect(detail)


def remedy(tree: Tree) -> Finding:
    """The same with the folders nibble makes."""
    names = tuple(path.name for path in tree.path(FOLDER).glob("*.json"))
    counts: dict[str, int] = {}
    for card in UNTUNED:
        with tempfile.TemporaryDirectory() as cache:
            alias = find_alias(
                card, load_target("sm120"), TunedConfigs(tree.path(FOLDER), names), Path(cache)
            )
            if alias is None:
                return defect(f"nibble has no folder for {card}")
            make_folder(alias)
            counts[card] = configurations(tree, card, alias.folder)
            if counts[card] != len(alias.links):
                return defect(f"{card}: {counts[card]} found of {len(alias.links)} linked")
    return sound(
        ", ".join(f"{card.removeprefix('NVIDIA ')}: {count}" for card, count in counts.items())
    )


def configurations(tree: Tree, card: str, folder: Path | None = None) -> int:
    """For how many of the shapes in vLLM's folder its loader has a configuration on a GPU of
    this name.
    """
    settings = SimpleNamespace(
        VLLM_BATCH_INVARIANT=False, VLLM_TUNED_CONFIG_FOLDER=folder and str(folder)
    )
    platform = SimpleNamespace(get_device_name=lambda device_id=0: card)
    given = {
        "vllm.envs": settings,
        "vllm.platforms.current_platform": platform,
        "vllm.model_executor.layers.batch_invariant.vllm_is_batch_invariant": lambda: False,
    }
    get_moe_configs = Sources(tree, given).load(LOADER)
    shapes = {_shape(path.name) for path in tree.path(FOLDER).glob("*.json")}
    return sum(bool(get_moe_configs(*shape)) for shape in shapes)


def _shape(name: str) -> tuple[int, int, str | None, int, int]:
    """E, N, dtype and block shape of a file, as get_moe_configs takes them."""
    found = re.match(r"E=(\d+),N=(\d+),", name)
    assert found, name
    dtype = re.search(r",dtype=([^,]+?)(?=,|\.json)", name)
    block = re.search(r",block_shape=\[(\d+),(\d+)\]", name)
    rows, columns = (int(block[1]), int(block[2])) if block else (0, 0)
    return int(found[1]), int(found[2]), dtype and dtype[1], rows, columns
