"""Every shipped alert fires in Debian's Prometheus at the value it is for, and at no other.

A stand-in gives the metrics; test_measuring.py has a real server that is killed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support import prometheus

KEY = "alerts-key-0123456789"
GOOD = {
    "nibble_ready": 1,
    "nibble_canary_passed": 1,
    "nibble_assertion_passed": 1,
    "nibble_watchdog_paused": 0,
    "nibble_failed_starts": 0,
    'nibble_gpu_throttled{gpu="0"}': 0,
    'vllm:kv_cache_usage_perc{engine="0"}': 0.5,
}
BAD = {
    "CanaryFailed": {"nibble_canary_passed": 0},
    "WatchdogPaused": {"nibble_watchdog_paused": 1},
    "FailedStarts": {"nibble_failed_starts": 3},
    "Throttled": {'nibble_gpu_throttled{gpu="0"}': 1},
    "KVCacheFull": {'vllm:kv_cache_usage_perc{engine="0"}': 0.97},
    "NotReady": {"nibble_ready": 0},
    "SlowFirstToken": {"slow": 1},  # last: its rate covers minutes
}


class Metrics:
    """A server's /metrics with `values`. Each answer counts ten more first tokens, slow ones where
    `values` has `slow`.
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = dict(GOOD)
        self.tokens = {"0.5": 0, "10": 0, "+Inf": 0}

    def text(self) -> str:
        """The page."""
        for bound in self.tokens:
            self.tokens[bound] += 0 if bound == "0.5" and "slow" in self.values else 10
        family = "vllm:time_to_first_token_seconds_bucket"
        counts = [f'{family}{{le="{bound}"}} {count}' for bound, count in self.tokens.items()]
        values = [f"{name} {value}" for name, value in self.values.items() if name != "slow"]
        return "\n".join([*values, *counts]) + "\n"


@contextmanager
def serving(metrics: Metrics) -> Iterator[int]:
    """The port that gives the metrics, with the key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.headers.get("Authorization") == f"Bearer {KEY}"
            body = metrics.text().encode() if is_known else b""
            self.send_response(200 if is_known else 401)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Metrics, str]]:
    metrics = Metrics()
    with (
        serving(metrics) as port,
        prometheus.scraping(tmp_path_factory.mktemp("alerts"), port, KEY, quick=True) as url,
    ):
        prometheus.query(url, "nibble_ready == 1")
        yield metrics, url


@pytest.mark.parametrize("alert", list(BAD))
def test_an_alert_fires_at_its_value_and_ends_with_it(
    watched: tuple[Metrics, str], alert: str
) -> None:
    metrics, url = watched
    assert prometheus.firing(url, lambda names: not names) == {}
    metrics.values = GOOD | BAD[alert]
    try:
        (found,) = prometheus.firing(url, lambda names: alert in names).items()
    finally:
        metrics.values = dict(GOOD)
    assert found[0] == alert and found[1]["summary"] and found[1]["action"]


def test_every_shipped_alert_is_here() -> None:
    shipped = prometheus.METRICS.joinpath("rules.yml").read_text()
    assert {line.split()[-1] for line in shipped.splitlines() if "- alert:" in line} == set(BAD)


@pytest.mark.parametrize(
    ("series", "named"),
    [
        ({"up": "1x14 0x60", "nibble_ready": "1x14 stale"}, "nibble:8000"),
        ({"up": "1x75", "nibble_ready": "1x14 0x60"}, "nibble:8000"),
        ({"up": "1x14 stale", "nibble_ready": "1x14 _x60"}, "The server"),  # Compose took it away
    ],
    ids=["no answer", "no admission", "no container"],
)
def test_not_ready_fires_after_a_quarter_of_an_hour_and_says_which_server(
    series: dict[str, str], named: str, tmp_path: Path
) -> None:
    labels = '{job="nibble",instance="nibble:8000"}'
    summary = f"{named} has not been ready for 15 minutes"
    prometheus.check_over_time(
        tmp_path,
        {f"{name}{labels}": values for name, values in series.items()},
        "NotReady",
        {"29m": "", "31m": summary},
    )
