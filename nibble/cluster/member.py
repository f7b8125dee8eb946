"""A node's side of the cluster: it sends heartbeats and reads the head's state from the replies."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nibble.cluster.agent import AgentError, call
from nibble.cluster.roster import BEAT_S, LOST_S
from nibble.errors import NibbleError
from nibble.machine.process_table import family

_KEPT_ENDS = 16  # the last ones: when a run ends, all of its workers end
_LAST_BEAT_S = 5.0  # one call without an answer, and the facts
WORKER_TITLES = ("ray::RayWorkerP", "VLLM::Worker")  # /proc keeps 15 bytes


@dataclass(frozen=True)
class End:
    """A process of vLLM that ended by itself here, at `at` (monotonic seconds). `run` is the head's
    count of runs, 0 with Ray.
    """

    run: int
    pid: int
    why: str
    at: float


@dataclass
class Member:
    """Sends heartbeats to the head until `close`. Sends `facts` whenever the head has none of this
    node.
    """

    head: str
    token: str
    address: str
    role: str
    rank: int | None
    gpus: int
    environ: Mapping[str, str]
    facts: Callable[[], dict[str, Any]]
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    reply: dict[str, Any] = field(default_factory=dict)
    head_session: str = ""
    error: AgentError | None = None
    ended: tuple[End, ...] = ()
    _answered: float = field(default_factory=time.monotonic)
    _over: threading.Event = field(default_factory=threading.Event)
    _beat_now: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> Member:
        """Send heartbeats in a separate thread."""
        self._answered = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()
        return self

    def beat(self) -> None:
        """Send one heartbeat. Never raises: `error` says why the last one failed."""
        message = {
            "address": self.address,
            "session": self.session,
            "role": self.role,
            "rank": self.rank,
            "gpus": self.gpus,
            "busy": busy_processes(),
            "time": time.time(),
            "head": self.head_session,
        }
        now = time.monotonic()
        message["ended"] = [
            {"run": end.run, "pid": end.pid, "why": end.why, "ago_s": now - end.at}
            for end in self.ended
        ]
        try:
            if self.reply.get("wants_facts", True):
                # Reading the facts takes time, so the clock is read again after them.
                message |= {"facts": self.facts(), "time": time.time()}
            self.reply = call(self.head, "/beat", self.token, message, environ=self.environ)
            self.head_session = self.head_session or self.reply["session"]
            self.error, self._answered = None, time.monotonic()
        except AgentError as error:
            self.error = error
        except (OSError, NibbleError) as error:  # a fact or a certificate is unreadable
            self.error = AgentError(0, str(error))

    def tell_end(self, end: End) -> None:
        """Tell the head about `end` now and with every later heartbeat."""
        self.ended = (*self.ended, end)[-_KEPT_ENDS:]
        self._beat_now.set()

    def greet(self) -> None:
        """Ask the head whether it accepts the token, without joining; `error` says why not."""
        try:
            call(self.head, "/nodes", self.token, environ=self.environ)
            self.error, self._answered = None, time.monotonic()
        except AgentError as error:
            self.error = error

    @property
    def silence_s(self) -> float:
        """Seconds since the head last answered."""
        return time.monotonic() - self._answered

    @property
    def has_new_head(self) -> bool:
        """Whether the head has restarted since the first answer."""
        return self.reply.get("session", self.head_session) != self.head_session

    @property
    def has_lost_head(self) -> bool:
        """Whether the head has not answered for LOST_S."""
        return self.silence_s >= LOST_S

    def leave(self, why: str = "") -> None:
        """Tell the head that this node leaves, with `why` after an error. Ignores a head that does
        not answer.
        """
        self.close()
        if self._thread is not None:
            # A heartbeat after the goodbye would add the node to the list again.
            self._thread.join(_LAST_BEAT_S)
        with contextlib.suppress(AgentError):
            call(
                self.head,
                "/leave",
                self.token,
                {"address": self.address, "why": why},
                timeout_s=1.0,
                environ=self.environ,
            )

    def close(self) -> None:
        """Stop the heartbeats."""
        self._over.set()
        self._beat_now.set()

    def _run(self) -> None:
        while not self._over.is_set():
            self.beat()
            self._beat_now.wait(BEAT_S)
            self._beat_now.clear()


def busy_processes() -> int:
    """How many descendants of this process are vLLM workers."""
    return sum(process.name.startswith(WORKER_TITLES) for process in family(-1))
