"""What the status page calls a problem, and nibble's own metrics."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nibble.machine.gpu_state import ALARMING, GpuState
from nibble.serve.advice import advise
from nibble.serve.live import GpuReader, metrics_text
from tests.support.processor_time import with_neighbours

LIMITS = {
    "reserve_bytes": 8,
    "pause_below_bytes": 4,
    "stop_below_bytes": 2,
    "resume_from_bytes": 6,
}
READY: dict[str, Any] = {
    "state": "ready",
    "phase": "ready",
    "seconds_since_start": 12.5,
    "last_sign_of_life_age_s": 500.0,
    "assertion": {"verdict": "passed", "deviations": [], "ran": []},
    "canary": {"verdict": "passed", "findings": []},
    "memory": {"action": "serve", "available_bytes": 100, "total_bytes": 200, **LIMITS},
    "hang": {"limit_s": 60.0, "waited_s": 0.0},
    "lost": "",
}
QUIET = {"kv_share": 0.1, "waiting": 0}
HOT = GpuState(1, 0, 900, 1980, 300.0, 700.0, 91, 90, 0x20)
WELL = GpuState(0, 0, 1980, 1980, 300.0, 700.0, 60, 90, 0)


def failed_canary(verdict: str, warning: str = "") -> dict[str, Any]:
    finding = {"mechanism": "layers", "verdict": verdict, "detail": "layer 3", "warning": warning}
    return {"verdict": verdict, "findings": [finding]}


def test_a_server_in_order_has_no_problem() -> None:
    assert advise(READY, QUIET, [WELL], 300.0) == []


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"lost": "EngineCore (killed by SIGKILL)"}, "red", "EngineCore"),
        ({"state": "holding", "detail": "the load failed"}, "red", "the load failed"),
        ({"state": "draining"}, "amber", "stopping"),
        ({"assertion": {"deviations": ["a slow kernel"]}}, "red", "a slow kernel"),
        ({"canary": failed_canary("failed")}, "red", "layers: layer 3"),
        ({"canary": failed_canary("passed", "far off")}, "amber", "far off"),
        ({"state": "paused", "reason": "memory is short: 1 GiB"}, "red", "memory is short"),
        ({"memory": {"action": "pause"}}, "amber", "Memory is short"),
        ({"state": "starting", "phase": "load"}, "amber", "nothing for 500 s"),
        ({"hang": {"limit_s": 60.0, "waited_s": 31.0}}, "red", "has not moved for 31 s"),
    ],
)
def test_each_problem_has_a_level_the_fact_and_an_action(
    changes: dict[str, Any], level: str, words: str
) -> None:
    (found,) = advise({**READY, **changes}, QUIET, [], 300.0)
    assert found["level"] == level
    assert words in found["what"]
    assert found["action"].endswith(".")


def test_a_full_cache_is_a_problem_only_while_requests_wait() -> None:
    assert advise(READY, {"kv_share": 1.0, "waiting": 0}) == []
    (found,) = advise(READY, {"kv_share": 0.97, "waiting": 4})
    assert "4 requests wait" in found["what"]


def test_a_ready_server_without_metrics_and_a_hot_gpu_are_red() -> None:
    assert "metrics" in advise(READY, None)[0]["what"]
    (found,) = advise(READY, QUIET, [WELL, HOT])
    assert found["level"] == "red"
    assert "GPU 1" in found["what"]


def test_red_comes_first() -> None:
    found = advise({**READY, "state": "draining", "lost": "a worker"}, QUIET)
    assert [one["level"] for one in found] == ["red", "amber"]


def test_the_status_of_a_download_has_no_problem() -> None:
    assert advise({"state": "starting", "phase": "download", "detail": {"stage": "download"}}) == []


def test_own_metrics_are_what_prometheus_reads() -> None:
    families = text_string_to_metric_families(metrics_text(READY, failed_starts=2))
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    assert found["nibble_phase", "ready"] == 1
    assert found["nibble_phase", "load"] == 0
    assert found[("nibble_ready",)] == 1
    assert found[("nibble_canary_passed",)] == 1
    assert found[("nibble_failed_starts",)] == 2
    assert found["nibble_memory_limit_bytes", "pause_below"] == 4
    assert found[("nibble_memory_available_bytes",)] == 100


def test_metrics_tell_failed_paused_and_not_compared() -> None:
    status = {**READY, "state": "paused", "canary": failed_canary("failed"), "assertion": {}}
    text = metrics_text(status, 0)
    assert "nibble_canary_passed 0\n" in text
    assert "nibble_assertion_passed -1\n" in text
    assert "nibble_watchdog_paused 1\n" in text
    assert "nibble_ready 0\n" in text


def test_metrics_have_gpus_and_the_kernels_that_run() -> None:
    hot = dataclasses.replace(WELL, index=1, throttled_by=next(iter(ALARMING)))
    ran = {"linear": {'a "b"': 7}, "moe": {}, "attention": {"TRITON": 2}}
    status = {**READY, "assertion": {"verdict": "passed", "ran": [ran], "deviations": []}}
    families = text_string_to_metric_families(metrics_text(status, 0, [WELL, hot]))
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    assert found["nibble_gpu_throttled", "0"] == 0 and found["nibble_gpu_throttled", "1"] == 1
    assert found["nibble_gpu_celsius", "0"] == WELL.celsius
    assert found["nibble_kernel_layers", "linear", 'a "b"'] == 7


def test_a_driver_that_hangs_holds_up_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nibble.serve.live._NVML_TIMEOUT_S", 0.05)
    monkeypatch.setattr("nibble.serve.live.CACHE_S", 0.0)
    over, calls = threading.Event(), []

    def look(indices: Any) -> list[GpuState]:
        calls.append(indices)
        over.wait(10)
        return [WELL]

    reader = GpuReader([0], look)
    began = time.monotonic()
    assert [list(reader.read()) for _ in range(4)] == [[]] * 4
    assert time.monotonic() - began < with_neighbours(2)
    assert len(calls) == 1  # one request waits, not one for each poll
    over.set()
    deadline = time.monotonic() + 5
    while not reader.read():
        assert time.monotonic() < deadline


def test_a_cpu_asks_no_driver() -> None:
    assert GpuReader([], lambda indices: pytest.fail("asked")).read() == ()
