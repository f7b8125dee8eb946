"""Seeded damage to checkpoints, before vLLM is started: refused in one line with a documented
code, or taken.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from tests.support.models.checkpoint_fuzz import KINDS, NAMED, damage, outcome, split
from tests.support.models.generated_nvfp4 import Shape, write_checkpoint

SECONDS = float(os.environ.get("NIBBLE_FUZZ_QUICK_SECONDS", "8"))
SEED = int(os.environ.get("NIBBLE_FUZZ_SEED", "20261123"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Healthy models: formats, experts, one file and shards."""
    root = tmp_path_factory.mktemp("sound")
    dense, experts = Shape(layers=5), Shape(layers=5, experts=4)
    folders = [
        write_checkpoint(root / "bf16", dense, "bf16"),
        write_checkpoint(root / "modelopt", dense, "modelopt", w4a4=True),
        write_checkpoint(root / "compressed", dense, "compressed-tensors"),
        write_checkpoint(root / "experts", experts, "modelopt"),
    ]
    for folder in folders:
        (folder / "tokenizer.json").write_text("{}")
    for name in ("bf16", "modelopt"):
        folders.append(shutil.copytree(root / name, root / f"{name}-shards"))
        split(folders[-1])
    return folders


def test_healthy_models_pass(sound: list[Path]) -> None:
    for folder in sound:
        found = outcome(folder)
        assert (found.error, found.remarks) == (None, ()), folder


def test_damage_is_refused_by_name_or_taken(sound: list[Path], tmp_path: Path) -> None:
    end, number, refused = time.monotonic() + SECONDS, 0, 0
    while time.monotonic() < end or number < 2 * len(KINDS):
        folder, seed = tmp_path / "damaged", SEED + number
        done = damage(sound[number % len(sound)], folder, seed)
        found = outcome(folder)
        error = found.error
        where = f"seed {seed}, {sound[number % len(sound)].name}, {done}"
        if error is None:
            assert done.rule != "refused" and (done.rule != "told" or found.remarks), where
        else:
            assert error.code in NAMED and "\n" not in error.line() and len(error.line()) < 1500, (
                f"{where}: {error.line()}"
            )
            refused += 1
        shutil.rmtree(folder)
        number += 1
    assert refused > number // 4
