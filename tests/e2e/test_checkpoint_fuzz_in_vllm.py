"""Damaged checkpoints that nibble's checks take, in vLLM: ended by name while they load, or the
log-probs of the healthy model.

`NIBBLE_FUZZ_SECONDS` (600) bounds it, `NIBBLE_FUZZ_SEED` chooses the damage. On the CPU the same
weights give the same log-probs bit for bit; the bound leaves room for another order of sums.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from nibble.errors import ExitCode
from nibble.plan.plan import Plan
from nibble.serve.failures import engine_died
from tests.support.models.checkpoint_fuzz import Damage, damage, outcome, split
from tests.support.models.generated_nvfp4 import Shape, write_checkpoint
from tests.support.paths import IN_VLLM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not entry_points(group="vllm.general_plugins", name="nibble"),
        reason="nibble-kernels is not installed",
    ),
]
SECONDS = float(os.environ.get("NIBBLE_FUZZ_SECONDS", "600"))
SEED = int(os.environ.get("NIBBLE_FUZZ_SEED", "1"))
PROGRAM = IN_VLLM / "fuzz_in_vllm.py"
BOUND = 1e-3  # nats
ANSWER_SECONDS = 120
ENDED = "the process ended with"
# Loaded even where the checks refuse it: families that these do not know depend on the load to find
# it.
SEEN_WHILE_LOADING = ("absent tensor", "renamed tensor", "a row less")


class Vllm:
    """The program, asked for one folder after another; started again once it died, which is told
    as an error.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        with self.log.open("a") as log:
            return subprocess.Popen(
                [sys.executable, str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def ask(self, folder: Path, plan: Plan) -> dict[str, Any]:
        """Its answer for a model served as planned."""
        overrides = plan.args["--hf-overrides"].value if "--hf-overrides" in plan.args else {}
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps({"folder": str(folder), "overrides": overrides}) + "\n")
        self.process.stdin.flush()
        limit = threading.Timer(ANSWER_SECONDS, self.process.kill)
        limit.start()
        try:
            for line in self.process.stdout:
                if line.startswith("RESULT "):
                    return json.loads(line.removeprefix("RESULT "))
        finally:
            limit.cancel()
        code = self.process.wait()
        self.process = self._start()
        return {"error": f"{ENDED} {code}", "logprobs": []}

    def end(self) -> None:
        """Close its input and wait."""
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[Vllm]:
    found = Vllm(tmp_path / "vllm.log")
    yield found
    found.end()


@pytest.fixture
def sound(tmp_path: Path) -> list[Path]:
    """Healthy models."""
    dense, experts = Shape(layers=2), Shape(layers=2, experts=4)
    folders = [
        write_checkpoint(tmp_path / "bf16", dense, "bf16"),
        write_checkpoint(tmp_path / "modelopt", dense, "modelopt"),
        write_checkpoint(tmp_path / "compressed", dense, "compressed-tensors"),
        write_checkpoint(tmp_path / "experts", experts, "modelopt"),
    ]
    for folder in folders:
        (folder / "tokenizer.json").write_text("{}")
    folders.append(shutil.copytree(folders[1], tmp_path / "shards"))
    split(folders[-1])
    return folders


def wrong(found: dict[str, Any], healthy: list[float], done: Damage) -> str:
    """How an answer breaks the rule of its damage."""
    if done.rule == "safe":  # vLLM may refuse a value that it does not know, in its own words
        return found["error"] if found["error"].startswith(ENDED) else ""
    if found["error"]:
        told = engine_died("load", "exit code 1", found["error"], "", None)
        return "" if told.code is ExitCode.MODEL else found["error"][:400]
    far = max(abs(one - other) for one, other in zip(found["logprobs"], healthy, strict=True))
    return "" if math.isfinite(far) and far <= BOUND else f"log-probs differ by {far}"


def test_damage_is_refused_by_name_or_does_nothing(
    sound: list[Path], vllm: Vllm, tmp_path: Path
) -> None:
    seed, compared, faults = SEED, 0, []
    healthy, plans = {}, {}
    for folder in sound:
        plan = outcome(folder).plan
        assert plan is not None
        answer = vllm.ask(folder, plan)
        assert not answer["error"], answer
        healthy[folder], plans[folder] = answer["logprobs"], plan
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        folder, model = tmp_path / "damaged", sound[seed * 7 % len(sound)]
        done = damage(model, folder, seed)
        plan = outcome(folder).plan
        if (plan is not None and done.rule in ("exact", "safe")) or done.kind in SEEN_WHILE_LOADING:
            compared += done.rule == "exact"
            if fault := wrong(vllm.ask(folder, plan or plans[model]), healthy[model], done):
                faults.append(f"seed {seed}, {model.name}, {done}: {fault}")
        shutil.rmtree(folder)
        seed += 1
    assert not faults, "\n".join(faults)
    assert compared > 0
