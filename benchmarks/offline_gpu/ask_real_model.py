"""Serves a model with `nibble serve` and asks it with several kinds of sampling.

    python benchmarks/offline_gpu/ask_real_model.py MODEL LOG [NAME=VALUE …]

NAME=VALUE are environment variables of the server. Prints the canary's lines, the answers to
16 requests at a time, and the counter of steps.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

URL = "http://127.0.0.1:9201"
START_S, REQUESTS = 420.0, 16
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "What is 2 + 3?",
    "Say hello.",
)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.7, "top_p": 0.9, "seed": 5},
    "top-k and top-p": {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
    "the model's default": {},
}


def main() -> int:
    model, log = Path(sys.argv[1]), Path(sys.argv[2])
    ports = {"PORT": "9201", "NIBBLE_CONTROL_PORT": "9202"}
    environ = dict(os.environ) | ports | dict(word.split("=", 1) for word in sys.argv[3:])
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "nibble", "serve", str(model)], env=environ, stdout=out,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        name = name_when_ready(server)
        print(*(x for x in log.read_text().splitlines() if "canary" in x), sep="\n")
        if name:
            ask_all(name)
    finally:
        server.send_signal(signal.SIGTERM)
        print("the server ended with", server.wait(60))
    return 0 if name else 1


def name_when_ready(server: subprocess.Popen[bytes]) -> str:
    """The served model's name; empty if the server ended."""
    began = time.monotonic()
    while server.poll() is None and time.monotonic() - began < START_S:
        try:
            models = json.loads(fetched("/v1/models"))["data"]
        except OSError:
            time.sleep(0.3)
        else:
            print(f"ready after {time.monotonic() - began:.0f} s")
            return models[0]["id"]
    return ""


def ask_all(name: str) -> None:
    for kind, sampling in SAMPLING.items():
        with concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool:
            for _ in range(3):
                answers = list(pool.map(lambda n, s=sampling: ask(name, n, s), range(REQUESTS)))
        print(f"{kind}: {len(set(answers))} answers differ;", json.dumps(answers[:4]))
    print(*(x for x in fetched("/metrics").splitlines() if x.startswith("nibble_engine")), sep="\n")


def ask(name: str, number: int, sampling: dict[str, Any]) -> str:
    messages = [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}]
    body = {"model": name, "messages": messages, "max_tokens": 48} | sampling
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(URL + "/v1/chat/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["choices"][0]["message"]["content"]


def fetched(path: str) -> str:
    with urllib.request.urlopen(URL + path, timeout=5) as page:
        return page.read().decode()


if __name__ == "__main__":
    sys.exit(main())
