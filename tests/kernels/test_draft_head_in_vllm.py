"""The drafter's head in NVFP4 through a real vLLM on the CPU: the target keeps its head, and the
answers are the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.changes import OPERATORS
from tests.support.models.generated_nvfp4 import Shape, write_checkpoint
from tests.support.models.mtp_model import write_mtp_model
from tests.support.models.tiny_drafts import DRAFT_VOCABULARY, HIDDEN, VOCABULARY, write_draft
from tests.support.paths import IN_VLLM
from tests.support.servers.serving import clean_environ

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS)]
DRAFTS = 2
KINDS = ("eagle", "eagle3", "mtp")
UNQUANTIZED, QUANTIZED = "UnquantizedEmbeddingMethod", "QuantizedDraftHead"

Found = dict[str, dict[str, Any]]  # "eagle nvfp4" and the like -> what was served


def serve(jobs: dict[str, dict[str, Any]], folder: Path, **environ: str) -> Found:
    done = subprocess.run(
        [sys.executable, str(IN_VLLM / "draft_head_in_vllm.py")],
        input=json.dumps(list(jobs.values())),
        env=clean_environ(folder, VLLM_ALLOW_INSECURE_SERIALIZATION="1", **environ),
        text=True,
        capture_output=True,
        check=False,
        cwd=folder,
    )
    lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(jobs), done.stdout[-3000:] + done.stderr[-3000:]
    return dict(zip(jobs, map(json.loads, lines), strict=True))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("drafts")
    target = write_checkpoint(folder / "target", Shape(layers=3), "bf16")
    mtp = str(write_mtp_model(folder / "mtp", "qwen3_next"))
    targets = {"eagle": str(target), "eagle3": str(target), "mtp": mtp}
    speculation: dict[str, dict[str, Any]] = {
        kind: {"method": kind, "num_speculative_tokens": DRAFTS} for kind in KINDS
    }
    for kind in ("eagle", "eagle3"):
        speculation[kind]["model"] = write_draft(folder / kind, kind, target)["folder"]
    jobs = {
        f"{kind} {head}": {
            "target": targets[kind],
            "speculation": speculation[kind],
            "head": head,
        }
        for kind in KINDS
        for head in ("bf16", "nvfp4")
    }
    jobs["alone"] = {"target": str(target), "speculation": None, "head": "nvfp4"}
    jobs["quantized target"] = jobs["eagle nvfp4"] | {"options": {"quantize_lm_head": "nvfp4"}}
    return serve(jobs, folder, VLLM_ENABLE_V1_MULTIPROCESSING="0")


@pytest.mark.parametrize("kind", KINDS)
def test_the_drafter_gets_an_nvfp4_copy_and_the_target_keeps_its_head(
    found: Found, kind: str
) -> None:
    before, after = found[f"{kind} bf16"], found[f"{kind} nvfp4"]
    assert before["target"] == before["drafter"] == after["target"] == UNQUANTIZED
    assert after["drafter"] == QUANTIZED and not after["shared"]
    assert before["shared"] == (kind != "eagle3")  # which has its own
    assert 0.28 < after["bytes"] / before["bytes"] < 0.3
    assert after["argmax_by_shards"] and before["argmax_by_shards"]
    assert after["reported"] == ["draft head: CpuNvFp4LinearKernel"]


def test_a_draft_vocabulary_keeps_its_size(found: Found) -> None:
    assert found["eagle3 nvfp4"]["rows"] == DRAFT_VOCABULARY < VOCABULARY
    assert found["eagle3 bf16"]["bytes"] == 2 * DRAFT_VOCABULARY * HIDDEN


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_the_same(found: Found, kind: str) -> None:
    before, after = found[f"{kind} bf16"], found[f"{kind} nvfp4"]
    assert after["tokens"] == before["tokens"]
    assert after["drafted"] > 0 and before["drafted"] > 0
    if kind != "mtp":
        assert after["tokens"] == found["alone"]["tokens"]


def test_drafts_of_a_sound_head_are_still_accepted(found: Found) -> None:
    assert found["mtp nvfp4"]["accepted"] == found["mtp nvfp4"]["drafted"]


def test_a_target_whose_head_is_quantized_shares_it(found: Found) -> None:
    served = found["quantized target"]
    assert served["shared"] and served["drafter"] == "QuantizedAtLoad"


@pytest.mark.slow
def test_two_ranks_share_a_global_scale(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", Shape(layers=3), "bf16")
    draft = write_draft(tmp_path / "draft", "eagle3", target)["folder"]
    speculation = {"method": "eagle3", "model": draft, "num_speculative_tokens": DRAFTS}
    split = {"target": str(target), "speculation": speculation, "ranks": 2}
    by_shards = split | {"speculation": speculation | {"use_local_argmax_reduction": True}}
    jobs = {
        "bf16": split | {"head": "bf16"},
        "nvfp4": split | {"head": "nvfp4"},
        "by shards": by_shards | {"head": "nvfp4"},
    }
    found = serve(jobs, tmp_path, VLLM_CPU_OMP_THREADS_BIND="nobind")
    for name in ("nvfp4", "by shards"):
        first, second = found[name]["ranks"]
        assert first["drafter"] == second["drafter"] == QUANTIZED
        assert first["rows"] == second["rows"] == DRAFT_VOCABULARY // 2
        assert first["global_scale"] == second["global_scale"] is not None
        assert first["argmax_by_shards"] and second["argmax_by_shards"]
        assert found[name]["tokens"] == found["bf16"]["tokens"]
