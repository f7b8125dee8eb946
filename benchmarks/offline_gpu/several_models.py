"""Two models on one port and one GPU that has room for one: they take turns, and one sleeps.

    python benchmarks/offline_gpu/several_models.py MODEL OTHER LOG

Asks each model twice, in turns, and prints the answers, the seconds each took and the models'
states. Exits with 1 if a model's second answer differs from its first.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

PORT, CONTROL_PORT = 9221, 9222
START_S = 300.0
ROOM = {
    "NIBBLE_LOADING": "on-demand",
    "NIBBLE_UNLOAD": "sleep",
    "NIBBLE_KV_CACHE_BYTES": str(2 << 30),
    "GPU_MEMORY_UTIL": "0.05",  # of an H200: more than a model and one that sleeps
}


def main() -> int:
    named = {"one": sys.argv[1], "two": sys.argv[2]}
    log = Path(sys.argv[3])
    ports = {"PORT": str(PORT), "NIBBLE_CONTROL_PORT": str(CONTROL_PORT)}
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "nibble", "serve", *(f"{n}={m}" for n, m in named.items())],
            env=dict(os.environ) | ROOM | ports, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        wait(server)
        answers = [[ask(name) for name in named] for _ in range(2)]
    finally:
        server.send_signal(signal.SIGTERM)
        print("the server ended with", server.wait(90))
    return int(answers[0] != answers[1])


def wait(server: subprocess.Popen[bytes]) -> None:
    began = time.monotonic()
    while server.poll() is None and time.monotonic() < began + START_S:
        try:
            get(CONTROL_PORT, "/ready")
            return
        except OSError:
            time.sleep(0.5)
    raise SystemExit("no server")


def get(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        text = answer.read().decode()
    return json.loads(text) if text.startswith(("{", "[")) else text


def ask(model: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        text: str = json.load(answer)["choices"][0]["message"]["content"]
    seconds = time.monotonic() - began
    states = {one["model"]: one["state"] for one in get(CONTROL_PORT, "/status")["models"]}
    print(
        json.dumps({"model": model, "seconds": round(seconds, 2), "text": text, "states": states})
    )
    return text


if __name__ == "__main__":
    raise SystemExit(main())
