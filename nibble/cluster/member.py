"""A node's side of the cluster: it sends heartbeats and learns what the head does."""

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

_KEPT_ENDS = 16  # a run that ends takes all of them with it
_LAST_BEAT_S = 5.0  # an unanswered call and the facts
PART_TITLES = ("ray::RayWorkerP", "VLLM::Worker")  # of the 15 bytes that /proc keeps


@dataclass(frozen=True)
class End:
    """A process of vLLM's that a run needs and that ended by itself here, at `at` (monotonic).
    `run` is 0 with Ray.
    """

    run: int
    pid: int
    why: str
    at: float


@dataclass
class Member:
    """Beats to the head until `close`. `facts` is sent whenever the head has none yet."""

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
    _news: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> Member:
        """Beat in a separate thread."""
        self._answered = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()
        return self

    def beat(self) -> None:
        """One beat. Never raises: `error` says why the last one failed."""
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
            {"run": one.run, "pid": one.pid, "why": one.why, "ago_s": now - one.at}
            for one in self.ended
        ]
        try:
            if self.reply.get("wants_facts", True):
                message |= {"facts": self.facts(), "time": time.time()}  # facts take a moment
            self.reply = call(self.head, "/beat", self.token, message, environ=self.environ)
            self.head_session = self.head_session or self.reply["session"]
            self.error, self._answered = None, time.monotonic()
        except AgentError as error:
            self.error = error
        except (OSError, NibbleError) as error:  # a fact or a certificate that cannot be read now
            self.error = AgentError(0, str(error))

    def tell_end(self, end: End) -> None:
        """The head hears it now, and with each of the next beats."""
        self.ended = (*self.ended, end)[-_KEPT_ENDS:]
        self._news.set()

    def greet(self) -> None:
        """Ask the head whether it takes our token, without joining yet; `error` says why not."""
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
        """Whether the head is not the one that was there first."""
        return self.reply.get("session", self.head_session) != self.head_session

    @property
    def has_lost_head(self) -> bool:
        """Whether the head has been silent for too long."""
        return self.silence_s >= LOST_S

    def leave(self, why: str = "") -> None:
        """Say goodbye, and `why` where it is an error, where the head still listens."""
        self.close()
        if (
            self._thread is not None
        ):  # a beat after the goodbye would make a node that is silent for ever
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
        """No further beats."""
        self._over.set()
        self._news.set()

    def _run(self) -> None:
        while not self._over.is_set():
            self.beat()
            self._news.wait(BEAT_S)
            self._news.clear()


def busy_processes() -> int:
    """How many descendants of this process hold parts of a model for vLLM."""
    return sum(one.name.startswith(PART_TITLES) for one in family(-1))
