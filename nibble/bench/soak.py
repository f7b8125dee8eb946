"""Runs a soak: clients with mixed load, and beside them a look at the server every few seconds."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import psutil

from nibble.bench.drift import Scores, drift, score
from nibble.bench.load import Clients, Load, supported
from nibble.bench.served import Served, is_alive
from nibble.bench.verdict import Sample, Soak
from nibble.engine.metrics import totals
from nibble.errors import NibbleError
from nibble.serve.endpoint import Endpoint

LOOK_S, SCORE_S = 5.0, 60.0
GONE_AFTER_S, DRAIN_S, CLIENTS_END_S, GONE_END_S = 60.0, 30.0, 60.0, 5.0
_IN_FLIGHT = ("vllm:num_requests_running", "vllm:num_requests_waiting")


def memory_of(engine_pid: int | None) -> int | None:
    """Resident bytes of nibble's supervisor and everything below it; None if unknown."""
    if engine_pid is None:
        return None
    with contextlib.suppress(psutil.Error):
        engine = psutil.Process(engine_pid)
        root = engine.parent() or engine
        family = {one.pid: one for one in (root, *root.children(recursive=True))}
        return sum(_resident(one) for one in family.values())
    return None


def _resident(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return process.memory_info().rss
    return 0


@dataclass
class Watch:
    """What is seen of the server. `engine_pid` asks nibble's control port."""

    endpoint: Endpoint
    served: Served
    engine_pid: Callable[[], int | None]
    baseline: Scores
    samples: list[Sample] = field(default_factory=list)
    drifts: list[float] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _scored: float = field(default_factory=time.monotonic)
    _answered: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def look(self) -> None:
        """Take a sample, and once a minute score the fixed texts."""
        answers = is_alive(self.endpoint)
        pid = self.engine_pid()
        self.samples.append(Sample(round(self.seconds, 1), memory_of(pid), pid, answers))
        if answers:
            self._answered = time.monotonic()
            if time.monotonic() - self._scored >= SCORE_S:
                self.score()

    def score(self) -> None:
        """Compare the fixed texts with the baseline. Without an answer there is nothing to add."""
        self._scored = time.monotonic()
        with contextlib.suppress(OSError):
            self.drifts.append(drift(self.baseline, score(self.endpoint, self.served)))

    def is_gone(self) -> bool:
        """Whether it has not answered for a minute."""
        return time.monotonic() - self._answered > GONE_AFTER_S

    def left_over(self) -> int | None:
        """Requests that the engine holds after up to 30 s without clients; None if unknown."""
        until, held = time.monotonic() + DRAIN_S, None
        while time.monotonic() < until:
            held = in_flight(self.endpoint)
            if not held:
                break
            time.sleep(1)
        return held


def in_flight(endpoint: Endpoint) -> int | None:
    """Requests that run or wait in the engine; None if unknown."""
    with contextlib.suppress(OSError):
        status, page = endpoint.call("/metrics", timeout_s=10)
        found = totals(page.decode(errors="replace"), _IN_FLIGHT) if status == 200 else {}
        return round(sum(found.values())) if found else None
    return None


def soak(
    endpoint: Endpoint,
    served: Served,
    seconds: float,
    clients: int,
    engine_pid: Callable[[], int | None],
    tell: Callable[[Mapping[str, float]], None],
) -> Soak:
    """Load the server for `seconds` and return all that was seen; Ctrl-C and a server that is gone
    end it early. Raises CONFIG where the model gives no log-probs; OSError where the server ends
    before the load begins.
    """
    baseline = score(endpoint, served)
    load = Load(endpoint, served, baseline.ids)
    kinds, left_out = supported(load)
    watch = Watch(endpoint, served, engine_pid, baseline)
    watch.score()
    workers = Clients(load, kinds, clients, seed=random.SystemRandom().randrange(1 << 30))
    ended, left_over = "", None
    workers.start()
    try:
        while watch.seconds < seconds and not watch.is_gone():
            watch.look()
            tell(_progress(watch, load))
            time.sleep(min(LOOK_S, max(0.0, seconds - watch.seconds)))
        ended = "the server stopped answering" if watch.is_gone() else ""
    except KeyboardInterrupt:
        ended = "interrupted"
    except NibbleError as error:
        ended = str(error)
    running = workers.stop(GONE_END_S if watch.is_gone() else CLIENTS_END_S)
    if is_alive(endpoint):
        left_over = watch.left_over()
        watch.score()
    elif not ended:
        ended = "the server ended"
    counts, same = load.counts, load.counts.seeded.most_common(1)
    return Soak(
        seconds=round(watch.seconds, 1),
        done=dict(counts.done),
        failed=dict(counts.failed) | ({"unanswered": running} if running else {}),
        refused=dict(counts.refused),
        reasons=dict(counts.reasons.most_common()),
        left_out=left_out,
        seeded_same=same[0][1] / counts.seeded.total() if same else None,
        samples=tuple(watch.samples),
        drifts=tuple(round(value, 5) for value in watch.drifts),
        left_over=left_over,
        ended=ended,
    )


def _progress(watch: Watch, load: Load) -> dict[str, float]:
    with load.counts.lock:
        done, failed = load.counts.done.total(), load.counts.failed.total()
    return {
        "seconds": watch.seconds,
        "done": done,
        "failed": failed,
        "memory_bytes": watch.samples[-1].memory_bytes or 0,
        "drift": max(watch.drifts, default=0.0),
    }
