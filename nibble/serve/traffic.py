"""What the server does for clients: rates and latencies from vLLM's /metrics, for the status page.

vLLM counts since its start. `Window` keeps readings of the last minute, so that the page shows the
present. `TrafficReader` reads only when a page asks, and at most once in CACHE_S for all pages.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nibble.engine.metrics import Sample

CACHE_S = 1.5  # the page asks every 2 s
RATE_S, LATENCY_S = 10.0, 60.0

# vllm 0.32 v1/metrics/loggers.py
_GENERATED, _PROMPT = "vllm:generation_tokens_total", "vllm:prompt_tokens_total"
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_KV, _DONE = "vllm:kv_cache_usage_perc", "vllm:request_success_total"
_TTFT = "vllm:time_to_first_token_seconds_bucket"
_BETWEEN = "vllm:inter_token_latency_seconds_bucket"
NAMES = frozenset({_GENERATED, _PROMPT, _RUNNING, _WAITING, _KV, _DONE, _TTFT, _BETWEEN})


@dataclass(frozen=True)
class Reading:
    """One reading of /metrics: sums over engines, the fullest KV cache, buckets by upper bound."""

    at_s: float
    sums: Mapping[str, float]
    kv_share: float | None
    buckets: Mapping[str, Mapping[float, float]]

    @classmethod
    def of(cls, at_s: float, samples: Iterable[Sample]) -> Reading:
        sums: dict[str, float] = {}
        buckets: dict[str, dict[float, float]] = {}
        kv: list[float] = []
        for one in samples:
            if one.name == _KV:
                kv.append(one.value)
            elif math.isnan(one.upper_bound):
                sums[one.name] = sums.get(one.name, 0.0) + one.value
            else:
                counts = buckets.setdefault(one.name, {})
                counts[one.upper_bound] = counts.get(one.upper_bound, 0.0) + one.value
        return cls(at_s, sums, max(kv, default=None), buckets)


def quantile(counts: Mapping[float, float], share: float) -> float | None:
    """The value below which `share` of a histogram lies; None if it is empty.

    `counts` are cumulative, by upper bound. The value is interpolated within its bucket. In the
    last bucket, which has no end, it is the bucket's lower bound.
    """
    total = counts.get(math.inf, 0.0)
    if total <= 0:
        return None
    lower, below = 0.0, 0.0
    for bound in sorted(counts):
        if counts[bound] >= share * total:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (share * total - below) / (counts[bound] - below)
        lower, below = bound, counts[bound]
    return None


@dataclass
class Window:
    """Readings of the last LATENCY_S seconds, oldest first. Pure: readings have their time."""

    _readings: deque[Reading] = field(default_factory=deque)

    def add(self, reading: Reading) -> None:
        """Take a reading; counters that fell (a new engine) begin a new window."""
        if self._readings and reading.sums.get(_PROMPT, 0) < self._readings[-1].sums.get(
            _PROMPT, 0
        ):
            self._readings.clear()
        self._readings.append(reading)
        while reading.at_s - self._readings[0].at_s > LATENCY_S:
            self._readings.popleft()

    def to_json(self) -> dict[str, Any]:
        """The present; None for what takes a second reading, or requests."""
        last = self._readings[-1]
        return {
            "running": _whole(last.sums.get(_RUNNING)),
            "waiting": _whole(last.sums.get(_WAITING)),
            "kv_share": last.kv_share,
            "answered_total": _whole(last.sums.get(_DONE)),
            "generated_tokens_per_s": self._rate(_GENERATED),
            "prompt_tokens_per_s": self._rate(_PROMPT),
            "first_token_s": self._latencies(_TTFT),
            "between_tokens_s": self._latencies(_BETWEEN),
        }

    def _rate(self, name: str) -> float | None:
        last = self._readings[-1]
        first = next(one for one in self._readings if last.at_s - one.at_s <= RATE_S)
        if first is last or name not in last.sums:
            return None
        grown = last.sums[name] - first.sums.get(name, 0.0)
        return round(grown / (last.at_s - first.at_s), 1)

    def _latencies(self, name: str) -> dict[str, float | None]:
        last = self._readings[-1].buckets.get(name, {})
        first = self._readings[0].buckets.get(name, {})
        grown = {bound: count - first.get(bound, 0.0) for bound, count in last.items()}
        return {"p50": quantile(grown, 0.5), "p95": quantile(grown, 0.95)}


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


class TrafficReader:
    """Reads and keeps a window. `fetch` gives the text of /metrics, or None without an answer."""

    def __init__(self, fetch: Callable[[], str | None]) -> None:
        self._fetch = fetch
        self._window = Window()
        self._lock = threading.Lock()
        self._read_at_s = -math.inf
        self._found: dict[str, Any] | None = None

    def read(self) -> dict[str, Any] | None:
        """The present; None while vLLM does not answer. Several pages share one reading."""
        from nibble.engine.metrics import samples

        with self._lock:
            now = time.monotonic()
            if now - self._read_at_s >= CACHE_S:
                self._read_at_s = now
                page = self._fetch()
                self._found = None
                if page is not None:
                    self._window.add(Reading.of(now, samples(page, NAMES)))
                    self._found = self._window.to_json()
            return self._found
