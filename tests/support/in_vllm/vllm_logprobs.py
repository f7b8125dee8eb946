"""Log-probabilities that vLLM gives the next token: jobs for logprobs_in_vllm.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.paths import IN_VLLM
from tests.support.servers.serving import clean_environ

Job = tuple[str, dict[str, Any], list[int]]


def run(
    jobs: Sequence[Job], folder: Path, **environ: str
) -> tuple[list[list[float] | str], subprocess.CompletedProcess[str]]:
    """The results of the jobs in a separate process, with caches in `folder`, and that
    process.
    """
    done = subprocess.run(
        [sys.executable, str(IN_VLLM / "logprobs_in_vllm.py")],
        input=json.dumps(jobs),
        env=clean_environ(folder, VLLM_ENABLE_V1_MULTIPROCESSING="0", **environ),
        text=True,
        capture_output=True,
        check=False,
        cwd=folder,
    )
    lines = [
        line.removeprefix("RESULT ")
        for line in done.stdout.splitlines()
        if line.startswith("RESULT ")
    ]
    assert len(lines) == len(jobs), done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in lines], done
