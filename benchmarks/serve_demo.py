"""`nibble serve` from start to end on this machine: phases, exact answers, and a drain of streams.

    python benchmarks/serve_demo.py [--model nibble-demo] [--starts 2] [--logs DIR] [--out FILE]
        [FLAG …]

Starts the server (first with empty caches, then with filled ones), follows /status, and asks all
questions of models/demo_questions.jsonl at temperature 0. Then it sends SIGTERM while long streams
run: they must finish, new requests must get 503, the exit code must be 0, and no process may remain
on the GPU. Further arguments go to `nibble serve`. Writes benchmarks/results/TARGET_demo.json; exit
code 1 if a requirement failed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machine import machine  # noqa: E402

from nibble.machine.hardware import Hardware, detect  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
QUESTIONS = ROOT / "models" / "demo_questions.jsonl"
POLL_S = 0.5
START_LIMIT_S = 900.0
EXIT_LIMIT_S = 90.0
DRAIN_TOKENS = 1500


def main() -> int:
    """Run the starts and write the result; 1 if a requirement failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="nibble-demo", help="the embedded demo, or a folder that answers like it"
    )
    parser.add_argument("--starts", type=int, default=2, help="the first with empty caches")
    parser.add_argument(
        "--streams", type=int, default=4, help="streams that run when SIGTERM comes"
    )
    parser.add_argument("--logs", type=Path, help="keep logs and status lines here")
    parser.add_argument(
        "--out", type=Path, help="result file, default benchmarks/results/TARGET_demo.json"
    )
    parser.add_argument("--commit", help="commit of this tree, where git cannot tell")
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        logs = options.logs or Path(scratch) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        starts = []
        for number in range(options.starts):
            run = Run(
                [options.model, *flags], Path(scratch) / "caches", logs / f"start{number + 1}"
            )
            starts.append(
                {"caches": "filled" if number else "empty", **run.measure(options.streams)}
            )
            print(json.dumps(starts[-1], indent=2), file=sys.stderr, flush=True)
    result = {
        "what": (
            "nibble serve: seconds to ready by phase, exact answers, drain with running streams"
        ),
        "command": " ".join(["python", "benchmarks/serve_demo.py", *sys.argv[1:]]),
        "commit": options.commit or git_commit(),
        "machine": machine(),
        "target": starts[0]["target"],
        "questions": starts[0]["answers"]["asked"],
        "exact": min(start["answers"]["exact"] for start in starts),
        "starts": starts,
    }
    out = options.out or RESULTS / f"{starts[0]['target']}_demo.json"
    out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(start["kept_promises"] for start in starts) else 1


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Stream:
    """One long streamed answer, read in a thread."""

    chunks: int = 0
    tokens: int | None = None
    finish_reason: str | None = None
    error: str = ""

    def read(self, client: Any) -> None:
        """Read the answer to its end."""
        try:
            pieces = client.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": "What is NVFP4?"}],
                max_tokens=DRAIN_TOKENS,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            for piece in pieces:
                self.chunks += 1
                for choice in piece.choices:
                    self.finish_reason = choice.finish_reason or self.finish_reason
                if piece.usage:
                    self.tokens = piece.usage.completion_tokens
        except Exception as error:  # what the client sees is the result
            self.error = f"{type(error).__name__}: {error}"

    @property
    def is_complete(self) -> bool:
        """Whether every requested token arrived."""
        return (self.error, self.finish_reason, self.tokens) == ("", "length", DRAIN_TOKENS)


@dataclass
class Run:
    """One start, its questions and its end. `words` follow `nibble serve`; log and status lines go
    to `logs`.
    """

    words: Sequence[str]
    caches: Path
    logs: Path
    port: int = field(default_factory=free_port)
    control_port: int = field(default_factory=free_port)

    def measure(self, streams: int) -> dict[str, Any]:
        """All results of one start as plain data."""
        self.logs.mkdir(parents=True, exist_ok=True)
        memory_before = used_gpu_bytes(detect())
        began = time.monotonic()
        with (self.logs / "serve.log").open("wb") as log:
            server = subprocess.Popen(
                [sys.executable, "-m", "nibble", "serve", *self.words],
                env=self._environ(), cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            try:
                status, first_status_s = self._wait_until_ready(server, began)
                result = summarize(status) | {"first_status_s": first_status_s}
                result["answers"] = self._ask_all()
                result["drain"] = self._drain(server, streams)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    server.kill()
        result["exit_code"] = server.returncode
        result["gpu_after"] = {
            "processes": gpu_processes(),
            "used_bytes_before": memory_before,
            "used_bytes_after": used_gpu_bytes(detect()),
        }
        drain = result["drain"]
        result["kept_promises"] = (
            result["answers"]["exact"] == result["answers"]["asked"]
            and drain["streams_complete"] == streams
            and drain["refused_with_503_while_streaming"]
            and server.returncode == 0
            and not result["gpu_after"]["processes"]
        )
        return result

    def _environ(self) -> dict[str, str]:
        own = {
            "PORT": str(self.port),
            "NIBBLE_CONTROL_PORT": str(self.control_port),
            "NIBBLE_CACHE_DIR": f"{self.caches}/nibble",
            "VLLM_CACHE_ROOT": f"{self.caches}/vllm",
            "TRITON_CACHE_DIR": f"{self.caches}/triton",
            "FLASHINFER_WORKSPACE_BASE": f"{self.caches}/flashinfer",
            "CUDA_CACHE_PATH": f"{self.caches}/cuda",  # what the driver compiles from PTX
        }
        return {**os.environ, **own}

    def _wait_until_ready(
        self, server: subprocess.Popen[bytes], began: float
    ) -> tuple[dict[str, Any], float]:
        """(the last /status, seconds until the first one). Ends the program if the server ends
        first.
        """
        first: float | None = None
        with (self.logs / "status.jsonl").open("w") as lines:
            while True:
                status = self._control("/status")[1]
                if status is not None:
                    first = first or round(time.monotonic() - began, 2)
                    if status["state"] == "ready" and self._control("/ready")[0] == 200:
                        (self.logs / "ready.json").write_text(json.dumps(status, indent=2))
                        return status, first
                    lines.write(
                        json.dumps(
                            {k: v for k, v in status.items() if k not in ("plan", "history")}
                        )
                        + "\n"
                    )
                    lines.flush()
                if server.poll() is not None or time.monotonic() - began > START_LIMIT_S:
                    tail = (self.logs / "serve.log").read_text(errors="replace")[-4000:]
                    sys.exit(f"the server did not get ready (exit code {server.poll()}):\n{tail}")
                time.sleep(POLL_S)

    def _control(self, path: str) -> tuple[int, dict[str, Any] | None]:
        connection = http.client.HTTPConnection("127.0.0.1", self.control_port, timeout=5)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except OSError:
            return 0, None
        finally:
            connection.close()

    def _client(self) -> Any:
        from openai import OpenAI

        return OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=120
        )

    def _ask_all(self) -> dict[str, Any]:
        client, rows = (
            self._client(),
            [json.loads(line) for line in QUESTIONS.read_text().splitlines()],
        )
        differing: list[dict[str, str]] = []
        began = time.monotonic()
        for row in rows:
            answer = client.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": row["question"]}],
                temperature=0,
            )
            if (got := answer.choices[0].message.content) != row["answer"]:
                differing.append(
                    {"question": row["question"], "expected": row["answer"], "got": str(got)}
                )
        seconds = round(time.monotonic() - began, 2)
        return {
            "asked": len(rows),
            "exact": len(rows) - len(differing),
            "seconds": seconds,
            "differing": differing,
        }

    def _drain(self, server: subprocess.Popen[bytes], count: int) -> dict[str, Any]:
        """Send SIGTERM during `count` streams; how they, a new request and the server ended."""
        from openai import APIConnectionError, APIStatusError

        streams = [Stream() for _ in range(count)]
        threads = [
            threading.Thread(target=stream.read, args=(self._client(),)) for stream in streams
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: all(stream.chunks >= 10 or stream.error for stream in streams), 60)
        told = time.monotonic()
        server.send_signal(signal.SIGTERM)
        refusal, client = None, self._client()
        while refusal is None and time.monotonic() - told < 5:
            try:
                client.completions.create(model="default", prompt="Hello", max_tokens=1)
            except APIStatusError as error:
                refusal = error.status_code
            except APIConnectionError:
                refusal = 0  # the port is closed
        refused_after_s = round(time.monotonic() - told, 3)
        chunks = [stream.chunks for stream in streams]
        ready_status, state = (
            self._control("/ready")[0],
            (self._control("/status")[1] or {}).get("state"),
        )
        for thread in threads:
            thread.join(EXIT_LIMIT_S)
        streams_s = round(time.monotonic() - told, 2)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(EXIT_LIMIT_S)
        return {
            "streams": count,
            "tokens_each": DRAIN_TOKENS,
            "streams_complete": sum(stream.is_complete for stream in streams),
            "errors": [stream.error for stream in streams if stream.error],
            "new_request_status": refusal,
            "new_request_refused_after_s": refused_after_s,
            "chunks_at_refusal": chunks,
            # only a refusal before the last stream was over says anything
            "refused_with_503_while_streaming": (
                refusal == 503 and any(c < DRAIN_TOKENS for c in chunks)
            ),
            "ready_status": ready_status,
            "state": state,
            "streams_ended_after_s": streams_s,
            "server_ended_after_s": round(time.monotonic() - told, 2),
        }


def summarize(status: dict[str, Any]) -> dict[str, Any]:
    """The start-up from the last /status: each phase's seconds, and the facts of vLLM's log."""
    history = status["history"]
    ends = [entry["at_s"] for entry in history[1:]]
    phases = {
        entry["phase"]: round(end - entry["at_s"], 2)
        for entry, end in zip(history, ends, strict=False)
    }
    return {
        "target": status["plan"]["target"],
        "vllm_command": status["plan"]["command"],
        "seconds_to_ready": history[-1]["at_s"],
        "seconds_by_phase": phases,
        "facts": status["facts"],
    }


def wait_for(done: Callable[[], bool], limit_s: float) -> None:
    """Wait until `done` or the time limit."""
    deadline = time.monotonic() + limit_s
    while not done() and time.monotonic() < deadline:
        time.sleep(0.002)


def gpu_processes() -> list[str]:
    """The processes that nvidia-smi lists on GPUs; empty without nvidia-smi or a GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = [
        "nvidia-smi",
        "--query-compute-apps=pid,process_name,used_memory",
        "--format=csv,noheader",
    ]
    found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    return [line.strip() for line in found.stdout.splitlines() if line.strip()]


def used_gpu_bytes(here: Hardware) -> list[int | None]:
    """Bytes in use on each GPU, None where NVML reports nothing."""
    return [
        (
            None
            if gpu.memory_bytes is None or gpu.memory_free_bytes is None
            else gpu.memory_bytes - gpu.memory_free_bytes
        )
        for gpu in here.gpus
    ]


def git_commit() -> str | None:
    """The commit of this tree, None outside a repository."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
