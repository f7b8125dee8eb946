"""Copies of what is installed with one thing changed, to put on PYTHONPATH: another build of
nibble, its kernels or vLLM.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

from nibble.engine.installed import KERNEL_SOURCES
from nibble.engine.patching.apply import RECORD_FOLDER
from tests.support.paths import ROOT

KERNEL = "src/nibble_kernels/nvfp4_linear/cpu.cpp"


def changed_nibble(folder: Path, file: str = "serve/drain.py", added: str = "# changed\n") -> Path:
    """nibble with a line added to `file`."""
    shutil.copytree(
        ROOT / "nibble", folder / "nibble", ignore=shutil.ignore_patterns("__pycache__")
    )
    with (folder / "nibble" / file).open("a") as code:
        code.write(added)
    return folder


def without_comparisons(folder: Path) -> Path:
    """nibble whose preflight takes all nodes for equal."""
    names = ("settings_problems", "compare_code", "compare_checkpoints")
    added = "".join(f"{name} = lambda *given: []\n" for name in names)
    return changed_nibble(folder, "cluster/preflight.py", added)


def changed_kernels(folder: Path) -> Path:
    """nibble-kernels made from another source."""
    installed = package("nibble_kernels")
    shutil.copytree(
        installed, folder / installed.name, ignore=shutil.ignore_patterns("__pycache__")
    )
    place = folder / installed.name / KERNEL_SOURCES
    sources = json.loads(place.read_text()) if place.exists() else {}
    place.write_text(json.dumps(sources | {KERNEL: "0" * 64}))
    return folder


def changed_patches(folder: Path) -> Path:
    """vLLM without its last patch, by its record; everything else is linked."""
    installed = package("vllm")
    (folder / "vllm").mkdir(parents=True)
    for one in installed.iterdir():
        if one.name != RECORD_FOLDER:
            (folder / "vllm" / one.name).symlink_to(one)
    record = json.loads((installed / RECORD_FOLDER / "record.json").read_text())
    record["patches"].pop(list(record["patches"])[-1])
    (folder / "vllm" / RECORD_FOLDER).mkdir()
    (folder / "vllm" / RECORD_FOLDER / "record.json").write_text(json.dumps(record))
    return folder


def package(name: str) -> Path:
    """Where the installed package lies; it is not imported."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))
