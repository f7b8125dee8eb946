"""How a server ends whose step graph has a failing kernel.

    python benchmarks/step_graph_fault.py [--model FOLDER] [--out FILE]

Needs a GPU. A test plugin adds a kernel to each sampler graph. Once some tokens have come from the
graph, the kernel writes beyond all memory. Reports the exit code, the seconds from there to the
server's end, and nibble's last lines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
PORT, CONTROL_PORT, START_S, END_S = 9301, 9302, 240.0, 120.0
RESULT = ROOT / "benchmarks" / "results" / "step_graph_fault.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="nibble-demo-nvfp4")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    from machine import machine

    result = {"what": "a failing kernel in a step graph", "machine": machine()} | run(options.model)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0 if result["exit_code"] == 10 else 1


def run(model: str) -> dict[str, Any]:
    from tests.support.vllm_plugins.failing_kernel import install_failing

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        added = install_failing(Path(folder))
        added["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
        ports = {"PORT": str(PORT), "NIBBLE_CONTROL_PORT": str(CONTROL_PORT)}
        server = subprocess.Popen(
            [sys.executable, "-m", "nibble", "serve", model], env=dict(os.environ) | added | ports,
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            tokens, began = fail_between_tokens(server, Path(folder) / "fail")
            code = server.wait(END_S)
        finally:
            server.kill()
        log.seek(0)
        lines = log.read().decode(errors="replace").splitlines()
    ours = [line for line in lines if line.startswith("[nibble]") or "beyond_all" in line]
    seconds = round(time.monotonic() - began, 1)
    return {"exit_code": code, "seconds": seconds, "tokens": tokens, "lines": ours[-8:]}


def fail_between_tokens(server: subprocess.Popen[bytes], fail: Path) -> tuple[int, float]:
    """The number of tokens before the failure, and the time of it."""
    end, url = time.monotonic() + START_S, f"http://127.0.0.1:{PORT}/v1/"
    name = ""
    while not name and server.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(url + "models") as page:
            name = json.load(page)["data"][0]["id"]
        time.sleep(0.3)
    body = {"model": name, "prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        url + "completions", json.dumps(body | {"temperature": 0}).encode(), head
    )
    tokens, began = 0, time.monotonic()
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            tokens += line.startswith(b"data: {")
            if tokens == 50 and not fail.exists():
                fail.touch()
                began = time.monotonic()
    return tokens, began


if __name__ == "__main__":
    sys.exit(main())
