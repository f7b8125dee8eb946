"""Answers other than patches (a flag, a rule, a variable, a check): without one, exactly its probes
find the defect.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nibble.engine.patching.run import rows
from nibble.machine.paths import root
from tests.support.changes import PATCHING
from tests.support.releases.separating import halves, subsets
from tests.support.releases.trees import pristine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.when_changed(*PATCHING, "rules", "targets"),
]
ROWS = rows()
# Answer -> its probes, its file, and what is cut out of the file (a pattern) or written at its end.
CUT = r"\n\[\[rule\]\]\nid = \"{}\".*?(?=\n\[\[rule|\Z)"
ARGUMENT = r"\n\[args\.{}\].*?(?=\n\[)"
LAYERS = "nibble/engine/plugin/layers.py"
ANSWERS: dict[str, tuple[str, str, str, str]] = {
    "rule b12x moe": (
        "n11_b12x_scales",
        "rules/backends.toml",
        CUT.format("flashinfer-b12x-moe"),
        "",
    ),
    "rule b12x": (
        "n26_b12x_not_automatic",
        "rules/backends.toml",
        CUT.format("b12x-unmeasured"),
        "",
    ),
    "gb10 tokens": (
        "n13_gb10_batch_defaults",
        "targets/gb10.toml",
        ARGUMENT.format("max-num-batched-tokens"),
        "",
    ),
    "gb10 sequences": (
        "n13_gb10_batch_defaults",
        "targets/gb10.toml",
        ARGUMENT.format("max-num-seqs"),
        "",
    ),
    "gb10 memory": (
        "n14_gb10_free_memory",
        "nibble/plan/memory.py",
        "",
        "def _utilization(*_): return {}",
    ),
    "dead names": (
        "n22_dead_variables",
        "nibble/settings/environment.py",
        "",
        "def successor_of(*_): return None\ndef _is_known(*_): return True",
    ),
    "aliases": (
        "n23_moe_configs_by_name",
        "nibble/plan/moe_tuning.py",
        "",
        "def find_alias(*_): return None",
    ),
    "exclusions": (
        "s09_mtp_exclusion",
        "nibble/checkpoint/exclusions.py",
        "",
        "def correct(*_, **__): return None",
    ),
    "rule fp_quant": ("n20_qutlass_sm12x", "rules/backends.toml", CUT.format("sm12x-fp-quant"), ""),
    "kernel cache": (
        "n21_flash_attention_ptx",
        "targets/gb10.toml",
        r"\n\[env\.CUDA_CACHE_MAXSIZE\].*?(?=\n\[)",
        "",
    ),
    "dense merge": (
        "n08_dense_scale_merge n09_dense_divisor_merge s13_fused_global_scales",
        LAYERS,
        "",
        "def merge_layer(*_, **__): return None",
    ),
    "cpu kernel": (
        "n07_cpu_kernel",
        "nibble/engine/plugin/kernels.py",
        "",
        "def register_cpu_kernel(): pass",
    ),
    "head": (
        "s13b_lm_head",
        "nibble/engine/plugin/lm_head.py",
        "",
        "def register_head(): pass",
    ),
    "expert merge": ("n10_moe_w13_scale", LAYERS, "", "def merge_experts(*_, **__): return None"),
    "gemma4": (
        "s17_gemma4_attention",
        "nibble/plan/models/gemma4.py",
        "",
        "FLAGS = {name: {} for name in FLAGS}",
    ),
}
PROBES = sorted({probe for probes, *_ in ANSWERS.values() for probe in probes.split()})
# Left to the user (12); or no defect of the 0.32.0 wheel with its FlashInfer: N25, and N19
# (test_binaries.py shows it on 0.16.0).
WITHOUT_REMOVAL = {"s12_gb10_moe_config", "n25_flashinfer_targets", "n19_family_code"}


def nibble_without(answers: tuple[str, ...], folder: Path) -> Path:
    """A copy of this checkout without these answers."""
    for name in ("nibble", "patches", "rules", "targets", "recipes", "kernels"):
        shutil.copytree(root() / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for answer in answers:
        _, name, cut, written = ANSWERS[answer]
        text = (folder / name).read_text()
        if cut:
            text, count = re.subn(cut, "", text, flags=re.DOTALL)
            assert count == 1, f"{answer} is not in {name}"
        (folder / name).write_text(f"{text}\n{written}\n")
    return folder


# Half a minute each: two halves show that every probe fails without its answer and with it does
# not; that no other answer of the half is the reason, the sets after them.
LEFT_OUT = [(), *halves(list(ANSWERS))]
SEPARATING = [pytest.param(names, marks=pytest.mark.slow) for names in subsets(list(ANSWERS))]


@pytest.mark.parametrize(
    "left_out", [*LEFT_OUT, *SEPARATING], ids=lambda names: "+".join(names) or "none"
)
def test_without_an_answer_exactly_its_probes_fail(
    left_out: tuple[str, ...], tmp_path: Path
) -> None:
    copy = nibble_without(left_out, tmp_path)
    words = [
        sys.executable,
        "-m",
        "nibble.engine.patching.run",
        "--root",
        str(pristine("0.32.0")),
        *PROBES,
    ]
    environ = os.environ | {"PYTHONPATH": str(copy)}
    done = subprocess.run(words, cwd=copy, env=environ, text=True, capture_output=True, check=True)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [result["error"] for result in results if result["error"]]
    failed = {result["probe"] for result in results if result["remedy"]["state"] != "sound"}
    assert failed == {probe for answer in left_out for probe in ANSWERS[answer][0].split()}


def test_every_answer_is_taken_away_by_a_test() -> None:
    answered = {name for name, row in ROWS.items() if row.fix and row.fix.kind != "patch"}
    assert answered - WITHOUT_REMOVAL == set(PROBES)
