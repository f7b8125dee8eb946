"""What counts as a hang, and what only takes long: looks with times in, stalls out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from nibble.engine.contract.pulse import CALL, IDLE, STEP
from nibble.engine.pulse import Pulse
from nibble.serve.hang.rules import EXCUSED_FACTOR, Look, Seen, Stall, Stalls, excuse

LIMIT_S = 60.0
API = Seen(1, "API server", "sleeping", False, 1.0, 0)
CORE = Seen(2, "VLLM::EngineCore", "sleeping", False, 1.0, 0)
WORKER = Seen(3, "VLLM::Worker", "sleeping", False, 1.0, 0)
ASKING = Pulse("api", 1, IDLE, False, 7, 1, 0)
NOT_ASKING = replace(ASKING, requests=0)
IN_STEP = Pulse("engine", 2, STEP, False, 100, 1, 1)
IDLING = Pulse("engine", 2, IDLE, False, 100, 0, 0)


def look(
    at_s: float,
    *pulses: Pulse,
    answers: int | None = None,
    seen: Iterable[Seen] = (API, CORE, WORKER),
) -> Look:
    return Look(at_s, tuple(seen), pulses, int(at_s) if answers is None else answers)


def stall_of(looks: Iterable[Look]) -> tuple[float, Stall] | None:
    """(when, the first stall)."""
    stalls = Stalls(LIMIT_S)
    for one in looks:
        if found := stalls.feed(one):
            return one.at_s, found[0]
    return None


def every_5_s(until_s: float) -> Iterable[float]:
    return (5.0 * number for number in range(int(until_s / 5) + 1))


def test_a_step_that_does_not_end_is_a_stall_after_the_limit() -> None:
    found = stall_of(look(at, ASKING, IN_STEP) for at in every_5_s(300))
    assert found is not None
    assert found[0] == 65  # the limit, and what one token may take
    assert (found[1].kind, found[1].pid) == ("step", 2)
    assert found[1].what == "VLLM::EngineCore (pid 2) has not finished a step with 1 token(s)"


def test_steps_that_end_are_none_however_slow() -> None:
    looks = (look(at, ASKING, replace(IN_STEP, turns=int(at // 55))) for at in every_5_s(3000))
    assert stall_of(looks) is None


def test_a_long_prefill_may_take_longer_by_its_tokens() -> None:
    chunk = replace(IN_STEP, tokens=8192)
    assert stall_of(look(at, ASKING, chunk) for at in every_5_s(140)) is None
    found = stall_of(look(at, ASKING, chunk) for at in every_5_s(300))
    assert found is not None and found[0] == 145  # 60 s and 82 s


def test_a_prompt_of_100k_tokens_in_chunks_is_progress() -> None:
    chunks = (
        look(at, ASKING, replace(IN_STEP, tokens=2048, turns=int(at // 50)))
        for at in every_5_s(2500)
    )
    assert stall_of(chunks) is None


def test_an_idle_engine_is_none() -> None:
    assert stall_of(look(at, NOT_ASKING, IDLING) for at in every_5_s(100_000)) is None


def test_a_request_that_the_engine_does_not_take_is_one() -> None:
    found = stall_of(look(at, ASKING, IDLING) for at in every_5_s(300))
    assert found is not None and (found[0], found[1].kind) == (60, "untaken")


@pytest.mark.parametrize(
    "pulse", [replace(IDLING, is_paused=True), replace(IN_STEP, is_paused=True)]
)
def test_an_engine_that_sleeps_with_requests_is_none(pulse: Pulse) -> None:
    assert stall_of(look(at, ASKING, pulse) for at in every_5_s(10_000)) is None


def test_a_stopped_process_is_a_stall_without_any_request() -> None:
    stopped = (API, CORE, replace(WORKER, state="stopped"))
    found = stall_of(look(at, NOT_ASKING, IDLING, seen=stopped) for at in every_5_s(300))
    assert found is not None and found[0] == 60
    assert found[1].what == "VLLM::Worker (pid 3) is stopped (state T)"


def test_in_a_drain_a_stopped_process_has_5_s_and_a_step_as_long_as_ever() -> None:
    stalls = Stalls(LIMIT_S)
    stalls.stopped_limit_s = 5.0
    stopped = (API, replace(CORE, state="stopped"), WORKER)
    found = [stalls.feed(look(at, ASKING, IN_STEP, seen=stopped)) for at in (0.0, 1.0, 3.0, 5.0)]
    assert [[one.kind for one in stall] for stall in found] == [[], [], [], ["stopped"]]


def test_a_stop_that_ends_in_time_is_none() -> None:
    looks = [
        look(
            at,
            NOT_ASKING,
            IDLING,
            seen=(API, replace(CORE, state="stopped" if at % 60 else "sleeping"), WORKER),
        )
        for at in every_5_s(600)
    ]
    assert stall_of(looks) is None


def test_under_a_debugger_nothing_counts() -> None:
    traced = (API, replace(CORE, state="tracing-stop", is_traced=True), WORKER)
    assert stall_of(look(at, ASKING, IN_STEP, seen=traced) for at in every_5_s(10_000)) is None


def test_an_api_server_that_does_not_answer_is_one_and_before_it_serves_none() -> None:
    found = stall_of(look(at, NOT_ASKING, IDLING, answers=4) for at in every_5_s(300))
    assert found is not None and (found[0], found[1].kind) == (60, "api")
    silent = (replace(look(at, NOT_ASKING, IDLING), answers=None) for at in every_5_s(300))
    assert stall_of(silent) is None


def test_time_in_which_the_supervisor_did_not_run_does_not_count() -> None:
    """A suspended machine, a paused container, SIGSTOP to all, a box that swaps."""
    looks = [look(at, ASKING, IN_STEP) for at in (0, 5, 10, 3610, 3615, 3620)]
    assert stall_of(looks) is None
    backwards = [look(at, ASKING, IN_STEP) for at in (1000, 5, 10, 15)]
    assert stall_of(backwards) is None


def test_of_two_cores_the_one_that_stands_is_named() -> None:
    def both(at: float) -> Look:
        running = replace(IN_STEP, pid=9, turns=int(at))
        return look(at, ASKING, running, IN_STEP)

    found = stall_of(both(at) for at in every_5_s(300))
    assert found is not None and found[1].pid == 2


# --- excuses ---

STALL = Stall("step", 2, 65.0, 60.0, "x")


def grown(earlier: Look, pid: int, **more: float) -> Look:
    """Five seconds later, with so much more of one process."""
    seen = tuple(
        (
            replace(one, **{name: getattr(one, name) + by for name, by in more.items()})
            if one.pid == pid
            else one
        )
        for one in earlier.processes
    )
    return replace(earlier, at_s=earlier.at_s + 5, processes=seen)


BEFORE = look(100, ASKING, IN_STEP)


def test_a_worker_that_computes_on_the_cpu_is_excused_and_one_that_waits_for_a_gpu_is_not() -> None:
    busy = grown(BEFORE, WORKER.pid, cpu_s=4.0)
    assert excuse(STALL, busy, BEFORE, on_cpu=True) == "it uses CPU time"
    assert excuse(STALL, busy, BEFORE, on_cpu=False) == ""  # its host thread spins
    idle = grown(BEFORE, WORKER.pid, cpu_s=0.01)
    assert excuse(STALL, idle, BEFORE, on_cpu=True) == ""


def test_a_core_that_spins_while_it_waits_for_a_worker_is_no_excuse_unless_it_computes_itself() -> (
    None
):
    assert excuse(STALL, grown(BEFORE, CORE.pid, cpu_s=5.0), BEFORE, on_cpu=True) == ""
    alone = replace(BEFORE, processes=(API, CORE))
    assert (
        excuse(STALL, grown(alone, CORE.pid, cpu_s=5.0), alone, on_cpu=True) == "it uses CPU time"
    )


def test_compilers_compiling_stacks_swapping_and_calls_are_excuses() -> None:
    later = replace(BEFORE, at_s=105)
    assert (
        excuse(STALL, replace(later, programs=frozenset({"ptxas"})), BEFORE, False) == "ptxas runs"
    )
    inductor = 'File "/x/site-packages/torch/_inductor/codecache.py", line 3 in compile'
    assert excuse(STALL, later, BEFORE, False, inductor) == "it compiles"
    triton = 'File "/x/site-packages/triton/backends/nvidia/compiler.py", line 3 in make_cubin'
    assert excuse(STALL, later, BEFORE, False, triton) == "it compiles"
    assert excuse(STALL, grown(BEFORE, WORKER.pid, major_faults=3), BEFORE, False).endswith(
        "from disk"
    )
    call = replace(later, pulses=(ASKING, replace(IN_STEP, doing=CALL)))
    assert excuse(STALL, call, BEFORE, False) == "it runs a call"


def test_a_step_that_other_machines_take_part_in_has_ten_times_the_limit() -> None:
    """A rank on another machine may compile for longer than the limit; its CPU time is not seen
    here.
    """
    idle = replace(BEFORE, at_s=BEFORE.at_s + 5.0)
    assert excuse(STALL, idle, BEFORE, False) == ""
    assert excuse(STALL, idle, BEFORE, False, has_other_machines=True) == "other machines take part"
    late = replace(STALL, waited_s=STALL.limit_s * 10)
    assert excuse(late, idle, BEFORE, False, has_other_machines=True) == ""


@pytest.mark.parametrize(
    "file",
    [
        "torch/_dynamo/eval_frame.py",
        "torch/_inductor/output_code.py",
        "triton/runtime/jit.py",
        "torch/cuda/streams.py",
    ],
)
def test_a_compiled_graph_that_hangs_is_no_compilation(file: str) -> None:
    assert (
        excuse(STALL, replace(BEFORE, at_s=105), BEFORE, False, f'File "/x/{file}", line 3 in run')
        == ""
    )


def test_excuses_end_and_a_stopped_process_has_none() -> None:
    busy = grown(BEFORE, WORKER.pid, cpu_s=4.0)
    late = replace(STALL, waited_s=EXCUSED_FACTOR * STALL.limit_s)
    assert excuse(late, busy, BEFORE, on_cpu=True) == ""
    assert excuse(replace(STALL, kind="stopped"), busy, BEFORE, on_cpu=True) == ""


def test_a_busy_event_loop_is_excused_and_a_busy_engine_does_not_excuse_it() -> None:
    silent = replace(STALL, kind="api", pid=0)
    assert (
        excuse(silent, grown(BEFORE, API.pid, cpu_s=4.0), BEFORE, on_cpu=False)
        == "it uses CPU time"
    )
    assert excuse(silent, grown(BEFORE, WORKER.pid, cpu_s=4.0), BEFORE, on_cpu=True) == ""
