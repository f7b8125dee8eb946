"""A real server for end-to-end tests: `./entrypoint.sh serve …` on free ports, its output in
files.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nibble.machine.process_table import Process, processes
from tests.support.paths import ROOT

# What a GPU needs on which other servers run too, and one without a compiler for FlashInfer's
# sampler.
OF_THE_MACHINE = ("GPU_MEMORY_UTIL", "NIBBLE_KV_CACHE_BYTES", "VLLM_USE_FLASHINFER_SAMPLER")
START_TIMEOUT_S = 600.0  # 25 s on two free cores, 60 s compiled; tests share them with others


@functools.cache
def vllm_cache() -> Path:
    """vLLM's cache of this test session: without one each start would inspect its model class in
    a separate process.

    The first of the session's processes makes it; those that it starts find it in their
    environment.
    """
    name = "TESTS_VLLM_CACHE"
    if name not in os.environ:
        os.environ[name] = tempfile.mkdtemp(prefix="nibble-vllm-")
        atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)
    return Path(os.environ[name])


# Between Ray's and those that the kernel gives to connections, a block for each process of a test
# run: what a test finds free stays free until its server takes it.
FIRST_PORT, PORTS_OF_A_PROCESS, PORTS_OF_A_RUN = 21000, 2000, 20
# Test runs that begin at one moment have neighbouring process ids
_next_port = itertools.count(os.getpid() * PORTS_OF_A_RUN)


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which nothing listens, of this process alone."""
    block = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
    while True:
        offset = next(_next_port) % PORTS_OF_A_PROCESS
        port = FIRST_PORT + block * PORTS_OF_A_PROCESS + offset
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port


def clean_environ(folder: Path, **more: str) -> dict[str, str]:
    """This process's environment without anybody's settings; nibble's cache in `folder`, the
    tests' Python first on PATH.
    """
    ours = ("NIBBLE_", "VLLM_", "HF_", "RAY_")
    names = {"MODEL", "HOST", "PORT", "HEAD_IP", "WORKER_IP", "NUM_GPUS", "MAX_MODEL_LEN"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours) and k not in names}
    kept |= {name: os.environ[name] for name in OF_THE_MACHINE if name in os.environ}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    own = {
        "NIBBLE_CACHE_DIR": f"{folder}/nibble",
        "VLLM_CACHE_ROOT": str(vllm_cache()),
        "HF_HUB_OFFLINE": "1",
        "NIBBLE_REFERENCE": "off",
        # Seconds a start, and many models of the tests are random; tests of it switch it on
        "NIBBLE_CANARY": "off",
    }
    # Servers of several test processes would have a thread for each core, and wait for each other.
    threads = {"OMP_NUM_THREADS": "1"} if "PYTEST_XDIST_WORKER" in os.environ else {}
    return {**kept, "PATH": path, **own, **threads, **more}


class Server:
    """One run of the entry point. `folder` gets caches, stdout and stderr; `before` are words in
    front of the command.
    """

    def __init__(
        self, folder: Path, words: Sequence[str], before: Sequence[str] = (), **environ: str
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self.control_port = free_port(), free_port()
        self.out, self.err = folder / "stdout", folder / "stderr"
        ports = {"PORT": str(self.port), "NIBBLE_CONTROL_PORT": str(self.control_port)}
        self.environ = clean_environ(folder, **{**ports, **environ})
        self.engine_pid: int | None = None
        self.started = time.monotonic()
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*before, str(ROOT / "entrypoint.sh"), *words],
                env=self.environ,
                cwd=folder,
                stdout=out,
                stderr=err,
            )

    def log(self) -> str:
        """Everything it wrote so far."""
        return self.out.read_text(errors="replace") + self.err.read_text(errors="replace")

    def said(self) -> list[str]:
        """nibble's own lines."""
        return [
            line
            for line in self.err.read_text(errors="replace").splitlines()
            if line.startswith("[nibble]")
        ]

    def status(self) -> dict[str, Any] | None:
        """/status, or None while nothing listens."""
        with contextlib.suppress(OSError):
            status, body = self._get(self.control_port, "/status")
            assert status == 200
            found = json.loads(body)
            self.engine_pid = found["engine_pid"]
            return found
        return None

    def wait_for_status(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """The first /status that is answered."""
        return self._wait(self.status, timeout_s)

    def wait_until_ready(self) -> Server:
        """Until /ready says 200."""
        self._wait(lambda: self.is_ready() or None, START_TIMEOUT_S)
        self.status()
        return self

    def is_ready(self) -> bool:
        """/ready of the control port."""
        with contextlib.suppress(OSError):
            return self._get(self.control_port, "/ready")[0] == 200
        return False

    def ask(
        self, path: str, body: Any = None, key: str | None = None, timeout_s: float = 60
    ) -> tuple[int, Any]:
        """(status, parsed body) of one request to the API."""
        connection, response = self._send(path, body, key, timeout_s)
        with contextlib.closing(connection):
            text = response.read().decode()
            return response.status, json.loads(text) if text else None

    def metric(self, name: str) -> float:
        """The first value of `vllm:NAME` in /metrics."""
        text = self._get(self.port, "/metrics")[1].decode()
        found = re.search(rf"^vllm:{name}{{.*}} ([\d.e+-]+)$", text, re.MULTILINE)
        assert found, name
        return float(found[1])

    def stream(self, tokens: int, key: str | None = None, **more: Any) -> Stream:
        """Start a streaming completion of exactly `tokens` tokens."""
        options = {"include_usage": True}
        body = {
            "model": "default",
            "prompt": "word7 word11",
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        return Stream(
            self._send(
                "/v1/completions",
                {**body, "stream": True, "stream_options": options, **more},
                key,
                300,
            )
        )

    def signal(self, signum: int = signal.SIGTERM) -> None:
        """To the supervisor, as `docker stop` and Ctrl-C do."""
        self.process.send_signal(signum)

    def wait(self, timeout_s: float) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {timeout_s} s:\n{self.log()[-3000:]}"
            ) from None

    def engine_processes(self) -> list[Process]:
        """Living processes of vLLM's session."""
        assert self.engine_pid, "status() was never answered"
        return [one for one in processes() if one.session == self.engine_pid]

    def end(self) -> None:
        """For fixtures: make sure that it is gone."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _wait(self, look: Any, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while (found := look()) is None:
            assert self.process.poll() is None, (
                f"ended with {self.process.returncode}:\n{self.log()[-5000:]}"
            )
            assert time.monotonic() < deadline, (
                f"nothing after {timeout_s} s:\n{self.log()[-5000:]}"
            )
            time.sleep(0.1)
        return found

    def _get(self, port: int, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()

    def _send(
        self, path: str, body: Any, key: str | None, timeout_s: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        connection.request(
            "GET" if body is None else "POST", path, body and json.dumps(body), headers
        )
        return connection, connection.getresponse()


class Stream:
    """A streaming answer, read in a thread."""

    def __init__(self, sent: tuple[http.client.HTTPConnection, http.client.HTTPResponse]) -> None:
        self._connection, self._response = sent
        self.status = self._response.status
        self.chunks = 0
        self.finish_reason: str | None = None
        self.completion_tokens: int | None = None
        self.error: str | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for(self, chunks: int, timeout_s: float = 60) -> Stream:
        """Until that many chunks have come."""
        deadline = time.monotonic() + timeout_s
        while self.chunks < chunks:
            assert self._thread.is_alive(), (
                f"the stream ended after {self.chunks} chunks: {self.error}"
            )
            assert time.monotonic() < deadline, f"{self.chunks} chunks after {timeout_s} s"
            time.sleep(0.01)
        return self

    def is_open(self) -> bool:
        """Whether more may come."""
        return self._thread.is_alive()

    def hang_up(self) -> None:
        """As a client that is gone."""
        with contextlib.suppress(OSError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)

    def join(self, timeout_s: float) -> Stream:
        """Until it ends, one way or another."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), (
            f"the stream goes on after {timeout_s} s ({self.chunks} chunks)"
        )
        return self

    def _read(self) -> None:
        try:
            for event in self._events():
                if "error" in event:
                    self.error = json.dumps(event["error"])
                for choice in event.get("choices", ()):
                    self.chunks += 1
                    self.finish_reason = choice["finish_reason"] or self.finish_reason
                if event.get("usage"):
                    self.completion_tokens = event["usage"]["completion_tokens"]
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = repr(error)
        finally:
            self._connection.close()

    def _events(self) -> Iterator[dict[str, Any]]:
        for raw in self._response:
            text = raw.decode().strip().removeprefix("data: ")
            if text and text != "[DONE]":
                yield json.loads(text)
