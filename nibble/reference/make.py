"""Computes a reference in a separate process, for `nibble reference` and for a start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.errors import ExitCode, NibbleError
from nibble.machine.paths import root
from nibble.machine.processes import die_with_parent
from nibble.reference.store import Request

Say = Callable[[str], None]
DEVICES, DTYPES = ("cpu", "cuda"), ("float32", "float64")
END_S = 10.0  # to read the last lines of stderr after the process has ended


class NoReference(Exception):
    """The checkpoint cannot have a reference; a second try would fail too."""


class Ended(Exception):
    """The process ended without a result, for example out of memory."""


def run(
    request: Request, environ: Mapping[str, str], say: Say, limit_s: float | None = None
) -> dict[str, Any]:
    """Compute the reference and return its cost (compute.compute's result).

    environ: of the process; say: prints progress. Raises NoReference, Ended, and TimeoutError after
    `limit_s` seconds.
    """
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise NoReference("torch and transformers are not installed beside nibble")
    child = subprocess.Popen(
        [sys.executable, "-m", "nibble.reference.compute", json.dumps(request.to_json())],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=_environ(request, environ),
        preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 - it calls no more than prctl
    )  # fmt: skip
    try:
        return _follow(child, say, limit_s)
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()


def _environ(request: Request, environ: Mapping[str, str]) -> dict[str, str]:
    """The process's environment: no requests to the Hub, and GPUs are visible only for `cuda`."""
    path = os.pathsep.join(filter(None, [str(root()), environ.get("PYTHONPATH")]))
    added = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": path}
    if request.device == "cpu":
        added["CUDA_VISIBLE_DEVICES"] = ""
    return {**environ, **added}


def _follow(child: subprocess.Popen[str], say: Say, limit_s: float | None) -> dict[str, Any]:
    """Read the process's messages until it ends."""
    timer = threading.Timer(limit_s, child.kill) if limit_s else None
    if timer:
        timer.daemon = True
        timer.start()
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(child.stderr or ()), daemon=True)
    reader.start()
    message: dict[str, Any] = {}
    quarters_reported = 0
    for line in child.stdout or ():
        message = _parsed(line) or message
        quarters = message.get("layer", 0) * 4 // max(1, message.get("of", 1))
        if quarters > quarters_reported and message.get("of", 0) > 8:
            quarters_reported = quarters
            say(f"reference: layer {message['layer']} of {message['of']}")
    child.wait()
    reader.join(END_S)
    if timer:
        expired = not timer.is_alive() and child.returncode < 0
        timer.cancel()
        if expired:
            raise TimeoutError(f"it took more than {limit_s:.0f} s")
    if "done" in message:
        return message["done"]
    if "problem" in message:
        raise NoReference(message["problem"])
    last = errors[-1].strip() if errors else ""
    raise Ended(f"the process that computes it ended with {child.returncode} {last[:200]}".strip())


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        data = json.loads(line)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def make_request(
    checkpoint: Checkpoint,
    out: Path,
    activations: str,
    answer_tokens: int,
    keeps: bool,
    device: str,
    dtype: str,
) -> Request:
    """A request for a checkpoint on disk; see store.Request.

    Raises MODEL if the checkpoint is not on disk, USAGE for an unknown device or dtype.
    """
    for name, value, known in (("--device", device, DEVICES), ("--dtype", dtype, DTYPES)):
        if value not in known:
            raise NibbleError(
                ExitCode.USAGE,
                what=f"{name} is {value!r}",
                expected=" or ".join(known),
                action=f"correct {name}",
            )
    if checkpoint.path is None:
        what = f"{checkpoint.id} is not on this disk"
        raise NibbleError(
            ExitCode.MODEL, what=what, action=f"run `nibble pull {checkpoint.id}` first"
        )
    return Request(
        checkpoint.id,
        str(checkpoint.path),
        str(out),
        activations,
        dtype,
        device,
        answer_tokens,
        keeps,
    )
