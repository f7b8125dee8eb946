"""The crash-loop breaker: when a plan that failed is held back, and what clears its record."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nibble.errors import ExitCode, NibbleError
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from nibble.serve.crash_loop import (
    HOLDS_S,
    SILENT_END,
    Breaker,
    Failure,
    ended_without_exit_code,
    judge,
    plan_key,
    this_process,
)
from tests.support.models.tiny_model import write_model

DIED = NibbleError(ExitCode.ENGINE_DIED, what="vLLM ended by itself", action="see the log above")
NOW = 1_000_000.0


def failures(count: int, gap_s: float = 60.0, last_s: float = NOW) -> list[Failure]:
    return [
        Failure(last_s - gap_s * back, 10, f"cause {count - back}")
        for back in reversed(range(count))
    ]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def breaker(tmp_path: Path, said: list[str]) -> Breaker:
    return Breaker(tmp_path / "crash-loop" / "key.json", "model", said.append)


def fail(breaker: Breaker, times: int, error: NibbleError | None = DIED) -> None:
    for _ in range(times):
        breaker.begin()
        breaker.end(error)


@pytest.mark.parametrize(("count", "wait_s"), [(0, 0), (1, 0), (2, 0), (3, 60), (4, 300), (5, 900)])
def test_the_third_failure_and_later_ones_wait_longer_each_time(count: int, wait_s: float) -> None:
    found = judge(failures(count), NOW)
    assert (found.wait_s, found.is_tripped) == (wait_s, False)


def test_the_wait_counts_from_the_failure_and_the_last_cause_is_told() -> None:
    found = judge(failures(3), NOW + 45)
    assert (found.wait_s, found.cause, found.failures) == (15, "cause 3", 3)
    assert judge(failures(3), NOW + 61).wait_s == 0


def test_the_sixth_failure_ends_it_for_good() -> None:
    assert judge(failures(6), NOW).is_tripped
    assert judge(failures(6), NOW + 1e9).is_tripped


def test_failures_an_hour_apart_are_no_loop() -> None:
    assert judge(failures(5, gap_s=3601), NOW).wait_s == 0
    assert judge(failures(4), NOW + 3601).wait_s == 0
    assert judge([*failures(2, last_s=NOW - 4000), *failures(3)], NOW).failures == 3


def test_a_clock_that_was_set_back_waits_no_longer_than_the_hold() -> None:
    assert judge(failures(3), NOW - 1e6).wait_s == HOLDS_S[0]


def test_failures_are_kept_over_processes_and_a_success_clears_them(breaker: Breaker) -> None:
    fail(breaker, 3)
    again = Breaker(breaker.path, "model", print)
    assert 58 < again.verdict().wait_s <= 60
    again.clear()
    assert again.verdict().failures == 0 and not breaker.path.exists()


def test_what_the_user_asked_for_and_what_is_refused_before_the_load_do_not_count(
    breaker: Breaker,
) -> None:
    fail(breaker, 3, None)
    fail(breaker, 3, NibbleError(ExitCode.CONFIG, what="PORT is in use"))
    assert breaker.verdict().failures == 0 and not breaker.path.exists()


def test_memory_that_ran_out_while_serving_counts(breaker: Breaker) -> None:
    fail(breaker, 1, NibbleError(ExitCode.NO_FIT, what="stopped the engine"))
    assert breaker.verdict().failures == 1


def test_a_load_that_vllm_ended_for_want_of_weights_counts(breaker: Breaker) -> None:
    fail(breaker, 1, NibbleError(ExitCode.MODEL, what="vLLM ended the load"))
    assert breaker.verdict().failures == 1


def test_the_end_names_the_cause_and_the_file_that_clears_it(breaker: Breaker) -> None:
    fail(breaker, 6)
    verdict = breaker.verdict()
    error = breaker.tripped(verdict)
    assert verdict.is_tripped and error.code is ExitCode.CRASH_LOOP == 75
    assert "vLLM ended by itself" in error.line() and f"remove {breaker.path}" in error.line()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"failures": [1]}', '{"failures": [{"at_s": "x"}]}', "\0" * 50]
)
def test_a_damaged_record_is_dropped_and_not_fatal(
    breaker: Breaker, said: list[str], text: str
) -> None:
    breaker.path.parent.mkdir()
    breaker.path.write_text(text)
    assert breaker.verdict().failures == 0
    assert "is damaged; nibble drops it" in said[0] and not breaker.path.exists()


def test_a_cache_that_cannot_be_written_is_one_warning_and_no_breaker(
    tmp_path: Path, said: list[str]
) -> None:
    (tmp_path / "crash-loop").write_text("a file where the folder should be")
    breaker = Breaker(tmp_path / "crash-loop" / "key.json", "model", said.append)
    fail(breaker, 4)
    assert len(said) == 1 and "cannot be written (" in said[0]
    assert breaker.verdict().wait_s == 0


def test_a_start_that_never_came_back_counts(breaker: Breaker) -> None:
    breaker.begin()
    data = json.loads(breaker.path.read_text())
    boot, host, pid, started = data["failures"][0]["process"].split(" ")
    for process in (
        f"earlier-boot {host} {pid} {started}",
        f"{boot} {host} {pid} {int(started) - 1}",
    ):
        data["failures"] = [
            {"at_s": time.time(), "code": 0, "cause": SILENT_END, "process": process}
            for _ in range(3)
        ]
        breaker.path.write_text(json.dumps(data))
        assert breaker.verdict().wait_s > 50


def test_a_start_that_still_runs_elsewhere_does_not_count() -> None:
    me = this_process()
    boot, host, _, _ = me.split(" ")
    assert not ended_without_exit_code(me, me)
    assert not ended_without_exit_code(f"{boot} another-container 7 1", me)
    assert ended_without_exit_code(f"{boot} {host} 4194305 1", me)
    assert str(os.getpid()) in me


def test_a_start_on_another_host_stays_on_record_whatever_this_one_does(breaker: Breaker) -> None:
    boot = this_process().split(" ")[0]
    there = asdict(Failure(time.time(), 0, SILENT_END, f"{boot} another-container 7 1"))
    breaker.path.parent.mkdir()
    breaker.path.write_text(json.dumps({"failures": [there]}))
    fail(breaker, 1)
    assert breaker.verdict().failures == 1
    fail(breaker, 1, None)
    breaker.clear()
    assert breaker.verdict().failures == 0
    assert json.loads(breaker.path.read_text())["failures"] == [there]


class TestKey:
    @pytest.fixture
    def plan(self, tmp_path: Path) -> Plan:
        return plan_for(read_wishes([str(write_model(tmp_path / "m")), "--target", "cpu"], {}))

    def again(self, plan: Plan, **environ: str) -> str:
        return plan_key(plan_for(read_wishes([plan.model, "--target", "cpu"], environ)), environ)

    def test_another_port_or_other_memory_free_is_the_same_plan(self, plan: Plan) -> None:
        args = dict(plan.args)
        args["--kv-cache-memory-bytes"] = replace(args["--kv-cache-memory-bytes"], value=12345678)
        assert plan_key(replace(plan, args=args), {}) == plan_key(plan, {})
        assert self.again(plan, PORT="9999") == plan_key(plan, {})
        assert self.again(
            plan, VLLM_HOST_IP="10.0.0.7", PATH="/bin", NIBBLE_API_KEY="12345678"
        ) == plan_key(plan, {})

    def test_another_setting_or_model_is_another_plan(self, plan: Plan, tmp_path: Path) -> None:
        other = plan_for(read_wishes([str(write_model(tmp_path / "other")), "--target", "cpu"], {}))
        keys = {
            plan_key(plan, {}),
            plan_key(other, {}),
            self.again(plan, MAX_NUM_SEQS="2"),
            self.again(plan, NIBBLE_KV_CACHE_BYTES="12345678"),
            self.again(plan, NIBBLE_MEMORY_RESERVE_GIB="2"),
            self.again(plan, NIBBLE_KERNEL_ASSERTION="warn"),  # as the errors of exit 8 advise
            self.again(plan, NIBBLE_CANARY="warn"),
            self.again(plan, VLLM_DISABLED_KERNELS="SomeKernel"),
        }
        assert len(keys) == 8
