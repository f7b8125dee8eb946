"""Runs one trial. What libraries print goes to stderr, so that stdout has JSON lines alone."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

from nibble.trials.trial import Trial

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(kind: str, value: Any) -> None:
        print(json.dumps({kind: value}), file=lines, flush=True)

    trial = Trial.from_json(json.loads(sys.stdin.readline()))
    tell("phase", "start")
    from nibble.trials.worker.tasks import TASKS, Teller

    result = TASKS[trial.task](trial, Teller(tell))
    tell("result", result)
    lines.flush()
    # Without destructors: libraries of vLLM may hang there, and the result is out.
    os._exit(0)


if __name__ == "__main__":
    main()
