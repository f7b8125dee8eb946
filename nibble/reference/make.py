"""Makes a reference in a separate process, for `nibble reference` and for a start."""

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
END_S = 10.0


class NoReference(Exception):
    """Why a checkpoint has none: nothing that a second try would change."""


class Ended(Exception):
    """How the computing process ended without a message, for example out of memory."""


def run(
    request: Request, environ: Mapping[str, str], say: Say, limit_s: float | None = None
) -> dict[str, Any]:
    """What the process says at its end. Raises NoReference, Ended, and TimeoutError after
    `limit_s`.
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
    """No lookup on the Hub, and a visible GPU only on request."""
    path = os.pathsep.join(filter(None, [str(root()), environ.get("PYTHONPATH")]))
    own = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": path}
    return {**environ, **own} | ({"CUDA_VISIBLE_DEVICES": ""} if request.device == "cpu" else {})


def _follow(child: subprocess.Popen[str], say: Say, limit_s: float | None) -> dict[str, Any]:
    over = threading.Timer(limit_s, child.kill) if limit_s else None
    if over:
        over.daemon = True
        over.start()
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(child.stderr or ()), daemon=True)
    reader.start()
    found: dict[str, Any] = {}
    told = 0
    for line in child.stdout or ():
        found = _parsed(line) or found
        share = found.get("layer", 0) * 4 // max(1, found.get("of", 1))
        if share > told and found.get("of", 0) > 8:
            told = share
            say(f"reference: layer {found['layer']} of {found['of']}")
    child.wait()
    reader.join(END_S)
    if over:
        expired = not over.is_alive() and child.returncode < 0
        over.cancel()
        if expired:
            raise TimeoutError(f"it took more than {limit_s:.0f} s")
    if "done" in found:
        return found["done"]
    if "problem" in found:
        raise NoReference(found["problem"])
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
    """Raises MODEL where the checkpoint is not on disk, USAGE for an unknown device or type."""
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
