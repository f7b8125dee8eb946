"""Row N24: the probe's model of Marlin's c_tmp is the kernel's, and the probe finds a buffer
that is too small.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from nibble.engine.patching import run
from nibble.engine.patching.probe import Finding
from nibble.engine.patching.tree import Tree, open_tree
from nibble.machine.paths import root
from tests.support.changes import PATCHING
from tests.support.releases import trees

PROBE = run.load("n24_marlin_moe_c_tmp")
MARLIN = "csrc/moe/marlin_moe_wna16"
MEASURED = json.loads((root() / "benchmarks/results/marlin_moe_c_tmp.json").read_text())[
    "fullest_calls"
]


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['gpu']}-{row['block_m']}")
def test_the_last_place_in_c_tmp_is_the_one_an_h200_wrote_to(row: dict):
    shape = PROBE.Shape(**{field.name: row[field.name] for field in fields(PROBE.Shape)})
    place = max(shape.block_m, 16) * shape.thread_n
    assert 0 <= PROBE.floats(shape, row["token_blocks"]) - row["written"] < place
    assert row["written"] <= row["allocated"]


def edited(folder: Path, name: str, old: str, new: str) -> Tree:
    """What the probe reads of the source archive, with `old` in one file replaced."""
    origin = trees.source_tree("0.32.0")
    for path in (
        "vllm/__init__.py",
        "CMakeLists.txt",
        "PKG-INFO",
        "csrc/quantization/marlin/marlin.cuh",
        f"{MARLIN}/ops.cu",
        f"{MARLIN}/marlin_template.h",
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text((origin / path).read_text())
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
    return open_tree(folder)


@pytest.mark.when_changed(*PATCHING)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if (moe_block_size == 8) max_c_tmp_size *= 2;", ""),
        (
            "(long)size_n * sorted_token_ids.size(0)",
            "(long)size_n * (sorted_token_ids.size(0) - 8)",
        ),
        ("(long)sms * 4 * moe_block_size", "(long)sms * moe_block_size"),
    ],
    ids=["8 tokens a block", "sorted tokens", "grid"],
)
def test_a_c_tmp_that_is_too_small_is_a_defect(tmp_path: Path, old: str, new: str):
    finding: Finding = PROBE.probe(edited(tmp_path, f"{MARLIN}/ops.cu", old, new))
    assert finding.state == "defect", finding.detail


@pytest.mark.when_changed(*PATCHING)
def test_another_kernel_is_not_judged_by_this_ones_bound(tmp_path: Path):
    tree = edited(
        tmp_path, f"{MARLIN}/marlin_template.h", "locks_off * c_size", "blockIdx.x * c_size"
    )
    assert PROBE.probe(tree).state == "not applicable"


@pytest.mark.when_changed(*PATCHING)
def test_c_tmp_without_the_clamp_is_sound_too(tmp_path: Path):
    tree = edited(
        tmp_path, f"{MARLIN}/ops.cu", "(long)size_n * sorted_token_ids.size(0)", "1l << 40"
    )
    assert PROBE.probe(tree).state == "sound"
