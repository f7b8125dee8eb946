"""What vLLM 0.32.0 chooses on each GPU with each way to FlashInfer's kernels, before and after
nibble's series.

The first table is that of shared/reference/patches.md, "What vLLM 0.32.0 picks", as far as this
environment goes: humming and b12x are not installed, so SM90 shows Marlin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nibble.engine.patching.apply import apply_series
from nibble.engine.patching.run import PROBE_ENVIRONMENT
from nibble.engine.patching.series import Series, load_series
from nibble.engine.patching.tree import open_tree
from nibble.machine.paths import root
from tests.support.releases.probes import support
from tests.support.releases.trees import copy_of, patched, pristine

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
fake_cuda, selection = support("fake_cuda"), support("selection")

GPUS = {
    "SM121": fake_cuda.SM121,
    "SM120": fake_cuda.SM120,
    "SM100": fake_cuda.SM100,
    "SM90": fake_cuda.SM90,
}
MACHINES = selection.TOOLCHAINS | {"online": {"online": True}}
COLUMNS = (
    "linear W4A4",
    "MoE W4A4",
    "attention bf16",
    "attention fp8",
    "attention h512",
    "attention sinks",
    "sampler",
)
# GPU, kernels (all offline but `online`, which has nvcc 13.0 too); what is taken first for each of
# COLUMNS
BEFORE = """
SM121 | nvcc 13.0 | FlashInferCutlassNvFp4 | FLASHINFER_CUTLASS | FLASH_ATTN | FLASHINFER | FLASHINFER | TRITON_ATTN | yes
SM121 | none      | CutlassNvFp4           | VLLM_CUTLASS       | FLASH_ATTN | FLASHINFER | FLASHINFER | TRITON_ATTN | yes
SM121 | nvcc 12.8 | FlashInferCutlassNvFp4 | FLASHINFER_CUTLASS | FLASH_ATTN | FLASHINFER | FLASHINFER | TRITON_ATTN | no
SM121 | cubins    | FlashInferCutlassNvFp4 | FLASHINFER_CUTLASS | FLASH_ATTN | FLASHINFER | FLASHINFER | FLASHINFER  | yes
SM121 | jit-cache | CutlassNvFp4           | VLLM_CUTLASS       | FLASH_ATTN | FLASHINFER | FLASHINFER | TRITON_ATTN | yes
SM121 | online    | FlashInferCutlassNvFp4 | FLASHINFER_CUTLASS | FLASH_ATTN | FLASHINFER | FLASHINFER | FLASHINFER  | yes
SM120 | online    | FlashInferCutlassNvFp4 | FLASHINFER_CUTLASS | FLASH_ATTN | FLASHINFER | FLASHINFER | FLASHINFER  | yes
SM120 | none      | CutlassNvFp4           | VLLM_CUTLASS       | FLASH_ATTN | FLASHINFER | FLASHINFER | TRITON_ATTN | yes
SM100 | online    | FlashInferCuteDslNvFp4 | FLASHINFER_TRTLLM  | FLASHINFER | FLASHINFER | FLASHINFER | FLASHINFER  | yes
SM100 | none      | CutlassNvFp4           | VLLM_CUTLASS       | FLASHINFER | FLASHINFER | FLASHINFER | FLASH_ATTN  | yes
SM100 | cubins    | FlashInferCuteDslNvFp4 | FLASHINFER_TRTLLM  | FLASHINFER | FLASHINFER | FLASHINFER | FLASHINFER  | yes
SM90  | online    | MarlinNvFp4            | MARLIN             | FLASH_ATTN | FLASH_ATTN | FLASH_ATTN | FLASH_ATTN  | yes
SM90  | none      | MarlinNvFp4            | MARLIN             | FLASH_ATTN | FLASH_ATTN | FLASH_ATTN | FLASH_ATTN  | yes
SM90  | cubins    | MarlinNvFp4            | MARLIN             | FLASH_ATTN | FLASH_ATTN | FLASH_ATTN | FLASH_ATTN  | yes
"""  # noqa: E501
AFTER = """
SM121 | nvcc 13.0 | FlashInferCutlassNvFp4 | FLASHINFER_CUTLASS | FLASH_ATTN | FLASHINFER  | FLASHINFER  | FLASHINFER  | yes
SM121 | none      | CutlassNvFp4           | VLLM_CUTLASS       | FLASH_ATTN | TRITON_ATTN | TRITON_ATTN | TRITON_ATTN | no
SM121 | nvcc 12.8 | CutlassNvFp4           | VLLM_CUTLASS       | FLASH_ATTN | TRITON_ATTN | TRITON_ATTN | TRITON_ATTN | no
SM121 | cubins    | CutlassNvFp4           | VLLM_CUTLASS       | FLASH_ATTN | TRITON_ATTN | TRITON_ATTN | TRITON_ATTN | no
SM121 | jit-cache | FlashInferCutlassNvFp4 | FLASHINFER_CUTLASS | FLASH_ATTN | FLASHINFER  | FLASHINFER  | FLASHINFER  | yes
SM121 | online    | FlashInferCutlassNvFp4 | FLASHINFER_CUTLASS | FLASH_ATTN | FLASHINFER  | FLASHINFER  | FLASHINFER  | yes
SM120 | online    | FlashInferCutlassNvFp4 | FLASHINFER_CUTLASS | FLASH_ATTN | FLASHINFER  | FLASHINFER  | FLASHINFER  | yes
SM120 | none      | CutlassNvFp4           | VLLM_CUTLASS       | FLASH_ATTN | TRITON_ATTN | TRITON_ATTN | TRITON_ATTN | no
SM100 | online    | FlashInferCuteDslNvFp4 | FLASHINFER_TRTLLM  | FLASHINFER | FLASHINFER  | FLASHINFER  | FLASHINFER  | yes
SM100 | none      | CutlassNvFp4           | VLLM_CUTLASS       | FLASH_ATTN | FLASH_ATTN  | FLASH_ATTN  | FLASH_ATTN  | no
SM100 | cubins    | CutlassNvFp4           | VLLM_CUTLASS       | FLASH_ATTN | FLASH_ATTN  | FLASH_ATTN  | FLASH_ATTN  | no
SM90  | online    | MarlinNvFp4            | MARLIN             | FLASH_ATTN | FLASH_ATTN  | FLASH_ATTN  | FLASH_ATTN  | yes
SM90  | none      | MarlinNvFp4            | MARLIN             | FLASH_ATTN | FLASH_ATTN  | FLASH_ATTN  | FLASH_ATTN  | no
SM90  | cubins    | MarlinNvFp4            | MARLIN             | FLASH_ATTN | FLASH_ATTN  | FLASH_ATTN  | FLASH_ATTN  | no
"""  # noqa: E501
QUESTIONS = (*COLUMNS, "has_flashinfer", "linear W4A16", "MoE W4A16", "FLASHINFER forced")
MORE_QUESTIONS = {  # to a GPU, beside QUESTIONS
    "SM121": ("attention MLA", "attention MLA sparse"),
    "SM120": (),
    "SM100": ("MLA prefill", "FLASHINFER_MLA", "FLASHINFER_MLA_SPARSE"),
    "SM90": ("attention MLA", "attention MLA sparse"),
}
Cell = tuple[str, str]
Answers = dict[Cell, dict[str, Any]]


def expected(table: str) -> dict[Cell, list[str]]:
    """The rows of a table by GPU and kernels."""
    rows = [[word.strip() for word in line.split("|")] for line in table.strip().splitlines()]
    return {(row[0], row[1]): row[2:] for row in rows}


CELLS = list(expected(BEFORE))
NO_KERNELS = [cell for cell in CELLS if cell[1] in ("none", "cubins", "nvcc 12.8")]


def ask(tree: Path, scratch: Path, cells: dict[Cell, tuple[str, ...]]) -> Answers:
    """The answers of vLLM in `tree` to the questions of each cell."""
    cases = [
        {"capability": GPUS[gpu], "machine": MACHINES[kernels], "questions": questions}
        for (gpu, kernels), questions in cells.items()
    ]
    environ = (
        os.environ
        | PROBE_ENVIRONMENT
        | {
            "PYTHONPATH": f"{root()}{os.pathsep}{root() / 'patches'}",
            "PYTHONPYCACHEPREFIX": str(scratch / "bytecode"),
        }
    )
    words = [sys.executable, "-m", "probes.support.selection", "--root", str(tree)]
    done = subprocess.run(
        words,
        input=json.dumps(cases),
        env=environ,
        cwd=scratch,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(cells, answers, strict=True))


def all_questions(cell: Cell) -> tuple[str, ...]:
    return QUESTIONS + MORE_QUESTIONS[cell[0]]


@pytest.fixture(scope="session")
def before(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Of the unchanged release; and what FlashInfer itself does on SM100 with cubins and no
    compiler.
    """
    cells = {cell: all_questions(cell) for cell in CELLS}
    cells["SM100", "cubins"] += ("trtllm-gen module",)
    return ask(pristine("0.32.0"), tmp_path_factory.mktemp("before"), cells)


@pytest.fixture(scope="session")
def after(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Of the release with nibble's series."""
    folder = tmp_path_factory.mktemp("after")
    cells = {cell: all_questions(cell) for cell in CELLS}
    for gpu in GPUS:
        cells[gpu, "jit-cache"] = (*cells.get((gpu, "jit-cache"), ()), "jit-cache targets")
    return ask(patched(folder / "tree"), folder, cells)


def first_choices(answer: dict[str, Any]) -> list[str]:
    """What is taken, a word a column."""
    words: dict[Any, Any] = {True: "yes", False: "no"}
    firsts = [
        answer[column][0] if isinstance(answer[column], list) else answer[column]
        for column in COLUMNS
    ]
    return [words.get(first, first) for first in firsts]


@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_pristine_vllm_chooses_as_the_reference_says(cell: Cell, before: Answers) -> None:
    assert first_choices(before[cell]) == expected(BEFORE)[cell]


@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_patched_vllm_chooses_what_can_run(cell: Cell, after: Answers) -> None:
    assert first_choices(after[cell]) == expected(AFTER)[cell]


@pytest.mark.parametrize("cell", NO_KERNELS, ids=" ".join)
def test_without_kernels_nothing_of_flashinfer_is_offered_even_second(
    cell: Cell, after: Answers
) -> None:
    answer = dict(after[cell])
    assert answer.pop("has_flashinfer") is False
    assert answer.pop("FLASHINFER forced").startswith("refused: Selected backend")
    for mla in ("FLASHINFER_MLA", "FLASHINFER_MLA_SPARSE"):
        assert answer.pop(mla, ["refused"]) != []
    assert "TRTLLM_RAGGED" not in answer.get("MLA prefill", [])
    assert "flashinfer" not in str(list(answer.values())).lower()


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell[1] == "online"], ids=" ".join)
def test_with_a_compiler_every_choice_is_what_it_was(
    cell: Cell, before: Answers, after: Answers
) -> None:
    assert after[cell] == before[cell]


def test_a_refused_flashinfer_says_what_is_missing(after: Answers) -> None:
    missing, old = (
        after["SM121", kernels]["FLASHINFER forced"] for kernels in ("none", "nvcc 12.8")
    )
    assert "flashinfer-jit-cache" in missing and "nvcc" in missing and "ninja" in missing
    assert "FlashInfer needs CUDA >= 12.9 for SM 12.x, found 12.8" in old


def test_cubins_launch_nothing_without_a_compiler(before: Answers) -> None:
    """Why they do not count on SM100 either: FlashInfer compiles the host code of its trtllm-gen
    attention.
    """
    assert before["SM100", "cubins"]["trtllm-gen module"].startswith("FileNotFoundError")


@pytest.mark.parametrize("gpu", GPUS)
def test_providers_of_jit_cache_count_where_flashinfer_takes_them(gpu: str, after: Answers) -> None:
    takes = after[gpu, "jit-cache"]["jit-cache targets"]
    assert {target: ours for target, (ours, _) in takes.items()} == {
        t: theirs for t, (_, theirs) in takes.items()
    }
    assert {ours for ours, _ in takes.values()} == {True, False}


@pytest.mark.parametrize("name", ["flashinfer-jit-ready", "flashinfer-xqa-offline"])
def test_each_patch_applies_alone(name: str, tmp_path: Path) -> None:
    whole = load_series("vllm")
    alone = Series(
        whole.project,
        whole.release,
        tuple(p for p in whole.patches if p.name == name),
        whole.pristine,
    )
    assert apply_series(open_tree(copy_of(pristine("0.32.0"), tmp_path / "tree")), alone) == [name]
