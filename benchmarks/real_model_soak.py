"""Ten minutes of mixed load on a running server of a real model: does anything drift?

    python benchmarks/real_model_soak.py --port PORT --pid PID [--minutes 10] [--out FILE]

PID is that of `nibble serve`. Clients send chats, sampled answers with n 2, log-probs, streams that
they leave, and JSON by a schema, in turn. Before and after, alone, 20 greedy chats: their answers
must be equal. Latency is that of a chat of 32 tokens under load, in the first and last third;
memory is the proportional set size of the server and its children after the first third and at the
end.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from machine import machine

Ask = Callable[[str, Any], tuple[int, Any]]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
QUESTIONS = [
    f"Tell me one fact about {subject}."
    for subject in (
        "Paris", "iron", "bees", "the Moon", "rain", "chess", "tea", "volcanoes", "bread", "maps",
        "glass", "whales", "Rome", "salt", "clocks", "bridges", "snow", "jazz", "trains", "oaks",
    )
]  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "subject": {"type": "string", "maxLength": 24},
        "score": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["subject", "score"],
    "additionalProperties": False,
}
CLIENTS = 4


def chat(question: str, tokens: int = 32, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    body = {"model": "default", "messages": messages, "max_tokens": tokens, "temperature": 0}
    return body | more


def greedy(ask: Ask) -> list[str]:
    """The answers to all questions, one after another."""
    found = []
    for question in QUESTIONS:
        status, answer = ask(CHAT, chat(question))
        assert status == 200, answer
        found.append(answer["choices"][0]["message"]["content"])
    return found


def requests(question: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """One of each kind."""
    by_schema = {"type": "json_schema", "json_schema": {"name": "fact", "schema": SCHEMA}}
    prompt = {"model": "default", "prompt": question * 20, "max_tokens": 8}
    return {
        "chat": (CHAT, chat(question)),
        "sampled": (CHAT, chat(question, n=2, temperature=1.0)),
        "log-probs": (COMPLETION, prompt | {"logprobs": 5, "prompt_logprobs": 5}),
        "json": (CHAT, chat(question, 80, response_format=by_schema)),
    }


def leave_a_stream(port: int, question: str) -> None:
    """Read a little of a stream and hang up."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        body = json.dumps(chat(question, 200, stream=True, ignore_eos=True))
        connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
        connection.getresponse().read(64)


def memory_bytes(pid: int) -> int:
    """Proportional set size of a process and its descendants: shared pages count once."""
    found = 0
    process = psutil.Process(pid)
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            found += one.memory_full_info().pss
    return found


class Load:
    """Clients that send one request after another until `seconds` are over."""

    def __init__(self, ask: Ask, port: int, seconds: float) -> None:
        self.ask, self.port, self.seconds = ask, port, seconds
        self.began = time.monotonic()
        self.statuses: Counter[str] = Counter()
        self.latencies: list[tuple[float, float]] = []  # (when it was sent, seconds)
        self._threads = [
            threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def passed(self) -> float:
        return time.monotonic() - self.began

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def median_s(self, third: int) -> float:
        """Of chats that were sent in that third."""
        size = self.seconds / 3
        inside = [
            took for sent, took in self.latencies if third * size <= sent < (third + 1) * size
        ]
        return round(statistics.median(inside), 3)

    def _client(self, number: int) -> None:
        for turn in itertools.count(number):
            if self.passed() > self.seconds:
                return
            question = QUESTIONS[turn % len(QUESTIONS)]
            for kind, (path, body) in requests(question).items():
                sent = self.passed()
                status, _ = self.ask(path, body)
                self.statuses[f"{kind} {status}"] += 1
                if kind == "chat":
                    self.latencies.append((sent, self.passed() - sent))
            leave_a_stream(self.port, question)
            self.statuses["streams left"] += 1


def soak(ask: Ask, port: int, pid: int, seconds: float) -> dict[str, Any]:
    """The load, and what changed meanwhile."""
    before = greedy(ask)
    load = Load(ask, port, seconds)
    time.sleep(seconds / 3)
    early_bytes = memory_bytes(pid)
    load.join()
    late_bytes = memory_bytes(pid)
    after = greedy(ask)
    return {
        "seconds": round(load.passed(), 1),
        "requests": dict(sorted(load.statuses.items())),
        "median_chat_s": {"first third": load.median_s(0), "last third": load.median_s(2)},
        "memory_bytes": {"after a third": early_bytes, "end": late_bytes},
        "equal_answers": sum(one == other for one, other in zip(before, after, strict=True)),
        "answers": len(before),
    }


def main() -> None:
    """Print the result, and write it where `--out` says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    def ask(path: str, body: Any) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", options.port, timeout=300)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    found = {"machine": machine(), "clients": CLIENTS}
    found |= soak(ask, options.port, options.pid, options.minutes * 60)
    text = json.dumps(found, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
