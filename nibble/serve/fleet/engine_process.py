"""One model's server as a child process: `nibble serve MODEL` on a loopback port.

It is the server that one model has alone: with its own supervisor, gate, canary, watchdog and
crash-loop breaker. A failure in it reaches no other model.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from nibble.engine.gate.asgi import INTERNAL_HEADER
from nibble.engine.gate.sleep import SLEEP_PATH, WAKE_PATH
from nibble.machine.processes import die_with_parent
from nibble.serve.control import ADDRESS

_ANSWER_S = 2.0
_SLEEP_S = 300.0  # 100 GB of weights at less than 1 GB/s
_CHUNK_BYTES = 1 << 16
_ERROR_LINE = re.compile(r"^nibble: error: (.*)$")


class EngineProcess:
    """The child. Construct it in the main thread: its death signal hangs on the thread that
    forked it.

    `port` and `control_port` are free ports of this machine, which it takes. `name` begins each
    line of its output.
    """

    def __init__(self, name: str, words: Sequence[str], environ: Mapping[str, str]) -> None:
        self.port, self.control_port = free_ports(2)
        self.error = ""  # its last error line
        path = os.pathsep.join(
            filter(None, [str(Path(__file__).resolve().parents[3]), environ.get("PYTHONPATH")])
        )
        own = ["--host", ADDRESS, "--port", str(self.port)]
        own += ["--control-port", str(self.control_port)]
        for_vllm = words.index("--") if "--" in words else len(words)
        words = [*words[:for_vllm], *own, *words[for_vllm:]]
        self._token = secrets.token_urlsafe(32)
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "nibble", "serve", *words],
            env={**environ, "PYTHONPATH": path, "NIBBLE_GATE_INTERNAL": self._token},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 - see the class
        )
        assert self._child.stdout is not None
        assert self._child.stderr is not None
        self._readers = [
            self._start(self._child.stdout, 1, name),
            self._start(self._child.stderr, 2, name),
        ]

    @property
    def pid(self) -> int:
        return self._child.pid

    def ended_with(self) -> int | None:
        """The exit code, after its last line was read; None while it runs."""
        code = self._child.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(timeout=1)
        return code

    def is_ready(self) -> bool:
        """Whether it admits requests."""
        return self._ask("/ready")[0] == http.HTTPStatus.OK

    def status(self) -> dict[str, Any]:
        """Its /status, empty without an answer."""
        return self._json("/status")

    def live(self) -> dict[str, Any]:
        """What its status page shows, empty without an answer."""
        return self._json("/nibble/live")

    def sleep(self) -> str:
        """Put the engine to sleep; empty, or why it failed. Takes seconds."""
        return self._tell_engine(SLEEP_PATH)

    def wake(self) -> str:
        """Wake the engine; empty, or why it failed. Takes seconds."""
        return self._tell_engine(WAKE_PATH)

    def _tell_engine(self, path: str) -> str:
        connection = http.client.HTTPConnection(ADDRESS, self.port, timeout=_SLEEP_S)
        try:
            connection.request("POST", path, headers={INTERNAL_HEADER.decode(): self._token})
            response = connection.getresponse()
            text = response.read().decode(errors="replace")[:500]
            return "" if response.status == http.HTTPStatus.OK else text or "no reason"
        except (OSError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            connection.close()

    def terminate(self) -> None:
        """Let it drain and end."""
        with contextlib.suppress(ProcessLookupError):
            self._child.send_signal(signal.SIGTERM)

    def kill_at_once(self) -> None:
        """End it now, as `kill`, and wait for nothing: memory is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()

    def kill(self) -> None:
        """End it now; its guardian then ends vLLM."""
        self.kill_at_once()
        self._child.wait()

    def _json(self, path: str) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            status, body = self._ask(path)
            found = json.loads(body) if status == http.HTTPStatus.OK else {}
            return found if isinstance(found, dict) else {}
        return {}

    def _ask(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(ADDRESS, self.control_port, timeout=_ANSWER_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def _start(self, source: IO[bytes], target: int, name: str) -> threading.Thread:
        prefix = f"[{name}] ".encode()

        def copy() -> None:
            for line in iter(lambda: source.readline(_CHUNK_BYTES), b""):
                if found := _ERROR_LINE.match(line.decode(errors="replace")):
                    self.error = found[1]
                with contextlib.suppress(OSError):
                    os.write(target, prefix + line)

        thread = threading.Thread(target=copy, name=f"log of {name}", daemon=True)
        thread.start()
        return thread


def free_ports(count: int) -> list[int]:
    """Ports on which nothing listens now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((ADDRESS, 0))
        return [probe.getsockname()[1] for probe in probes]
