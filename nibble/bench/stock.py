"""Another server beside nibble's: stock vLLM, SGLang or llama.cpp, with the same model."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nibble.bench.about import clean_environ
from nibble.bench.served import Served, find_served, is_alive
from nibble.errors import ExitCode, NibbleError
from nibble.machine.processes import die_with_parent, signal_name
from nibble.printable import printable
from nibble.serve.endpoint import Endpoint

NAME = "default"
STOCK, SGLANG, LLAMA_CPP = PEERS = ("stock", "sglang", "llama.cpp")
TITLES: Mapping[str, str] = {STOCK: "stock vLLM", SGLANG: "SGLang", LLAMA_CPP: "llama.cpp"}
# How to leave a peer less memory; both servers hold theirs at the same time.
_LESS_MEMORY: Mapping[str, str] = {
    STOCK: "--stock-flags '--gpu-memory-utilization 0.4'",
    SGLANG: "--peer-flags '--mem-fraction-static 0.4'",
    LLAMA_CPP: "a smaller --concurrency",
}
START_LIMIT_S, _END_S, _POLL_S = 1800.0, 30.0, 0.5
_EXIT_S = 5.0  # from the end of a peer's connections to that of its process
_LAST_LINES, _LINE_CHARS = 3, 160


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def stock_words(
    served: Served, port: int, kv_cache_bytes: int | None, flags: Sequence[str]
) -> list[str]:
    """The words after `vllm`: checkpoint, length and KV cache of nibble's server. `flags` follow,
    so that they win. Without a KV cache's size, vLLM takes most of the memory.
    """
    cache = [] if kv_cache_bytes is None else ["--kv-cache-memory-bytes", str(kv_cache_bytes)]
    return [
        *("serve", served.root, "--served-model-name", NAME),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", str(served.max_model_len), *cache, *flags),
    ]


@dataclass(frozen=True)
class Peer:
    """A server to start. `program` is a Python that has SGLang, or llama.cpp's `llama-server`;
    `gguf` the weights for llama.cpp, `streams` how many requests it gets at the same time.
    """

    name: str
    flags: Sequence[str] = ()
    program: str = sys.executable
    gguf: Path | None = None
    streams: int = 1

    @property
    def title(self) -> str:
        return TITLES[self.name]

    @property
    def client_flags(self) -> list[str]:
        """Flags of the benchmark for both servers. llama-server announces a connection that it
        keeps, and closes it after a stream: the next request on it would fail.
        """
        return ["--header", "Connection=close"] if self.name == LLAMA_CPP else []

    def command(self, served: Served, port: int, kv_cache_bytes: int | None) -> list[str]:
        """The whole command. Pure."""
        if self.name == STOCK:
            words = stock_words(served, port, kv_cache_bytes, self.flags)
            return [self.program, "-m", "vllm.entrypoints.cli.main", *words]
        if self.name == SGLANG:
            return [
                *(self.program, "-m", "sglang.launch_server", "--model-path", served.root),
                *("--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)),
                *("--context-length", str(served.max_model_len), *self.flags),
            ]
        return [
            *(self.program, "--model", str(self.gguf), "--alias", NAME),
            *("--host", "127.0.0.1", "--port", str(port), "--parallel", str(self.streams)),
            # llama.cpp divides its context among the streams
            *("--ctx-size", str(served.max_model_len * self.streams), *self.flags),
        ]


@dataclass(frozen=True)
class PeerProcess:
    """A peer that nibble started. `log` has what it prints."""

    peer: Peer
    endpoint: Endpoint
    child: subprocess.Popen[bytes]
    log: Path

    def has_ended(self) -> bool:
        """Whether its process is gone."""
        return self.child.poll() is not None

    def failed_start(self) -> NibbleError:
        """The error of a peer that ended before it was ready, or took too long."""
        how = (
            f" ({_end_of(self.child)})" if self.has_ended() else f" in {START_LIMIT_S / 60:.0f} min"
        )
        printed = self.log.read_text(errors="replace")
        # A killed server has not said why: an error in its log is of something else.
        by_itself = self.has_ended() and self.child.returncode >= 0
        cause = last_error(printed) if by_itself else f"it printed last: {last_lines(printed)}"
        return self._error(f"{self.peer.title} did not start{how}: {cause}")

    def lost(self) -> NibbleError:
        """The error of a peer that does not answer while it is measured."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(_EXIT_S)
        how = f"ended ({_end_of(self.child)})" if self.has_ended() else "stopped answering"
        return self._error(
            f"{self.peer.title} {how} while it was measured; it printed last:"
            f" {last_lines(self.log.read_text(errors='replace'))}"
        )

    def _error(self, what: str) -> NibbleError:
        return NibbleError(
            ExitCode.ENGINE_DIED,
            what=what,
            action=(
                f"see {self.log}; if its memory ran out, try {_LESS_MEMORY[self.peer.name]},"
                " or a smaller server of nibble's beside it"
            ),
        )


def _end_of(child: subprocess.Popen[bytes]) -> str:
    code = child.returncode
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"


@contextlib.contextmanager
def running(
    peer: Peer,
    served: Served,
    kv_cache_bytes: int | None,
    log: Path,
    environ: Mapping[str, str],
) -> Iterator[tuple[PeerProcess, Served]]:
    """The server while the block runs. Raises ENGINE_DIED where it does not start."""
    endpoint = Endpoint("127.0.0.1", free_port())
    with log.open("wb") as file:
        try:
            child = subprocess.Popen(
                peer.command(served, endpoint.port, kv_cache_bytes),
                env=clean_environ(environ), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 - no thread runs yet
            )  # fmt: skip
        except OSError as error:
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"{peer.program} cannot be run ({error.strerror})",
                expected=f"a program that starts {peer.title}",
                action="correct --peer-program",
            ) from None
    process = PeerProcess(peer, endpoint, child, log)
    try:
        _wait_until_ready(process)
        model = find_served(endpoint, environ, "bench", NAME)
        # A GGUF says only how long its training's context was
        yield process, replace(model, max_model_len=served.max_model_len)
    finally:
        _end(child)


def _wait_until_ready(process: PeerProcess) -> None:
    began = time.monotonic()
    while not is_alive(process.endpoint):
        if process.has_ended() or time.monotonic() - began > START_LIMIT_S:
            raise process.failed_start()
        time.sleep(_POLL_S)


def last_lines(log: str) -> str:
    """The last lines of a log, as one."""
    lines = [printable(line.strip())[:_LINE_CHARS] for line in log.splitlines() if line.strip()]
    return " | ".join(lines[-_LAST_LINES:]) or "nothing"


def last_error(log: str) -> str:
    """The line of a log that says why vLLM ended: the last exception that says something, else the
    last line.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line and "See root cause" not in line]
    found = (errors or lines or ["it printed nothing"])[-1]
    return printable(found[found.find("Error: ") + len("Error: ") :] if errors else found)[:300]


def _end(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM to its API process, then SIGKILL to its session."""
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
