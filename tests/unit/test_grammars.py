"""The worker of structured outputs: real forks, with a compiler that misbehaves as asked."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nibble.engine.guard import grammar_worker, grammars
from nibble.engine.guard.grammar_fields import (
    BATCH,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    grammar_fields,
)
from nibble.engine.guard.grammar_worker import Limits
from nibble.engine.guard.grammars import Grammars, Problem
from tests.support.paths import ROOT
from tests.support.servers.misbehaving import LIMITS, Misbehaving, regex


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the compiler was asked for, one a line."""
    path = tmp_path / "asked"
    path.touch()

    class Made:
        @staticmethod
        def of_app(app: Any) -> Misbehaving:
            return Misbehaving(path)

    monkeypatch.setattr(grammar_worker, "Compiler", Made)
    return path


@pytest.fixture(autouse=True)
def event_loop_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop, whose library has a handler for forks."""
    monkeypatch.setattr(asyncio, "run", pytest.importorskip("uvloop").run)


def run(work: Callable[[Grammars], Awaitable[Any]], limits: Limits = LIMITS) -> Any:
    """`work` in an event loop with a worker, which is gone afterwards."""

    async def main() -> Any:
        found = Grammars(limits)
        try:
            return await work(found)
        finally:
            found._stop()

    return asyncio.run(main())


def problem_of(text: str, limits: Limits = LIMITS) -> Problem | None:
    return run(lambda found: found.problem(CHAT, regex(text), None), limits)


def test_a_request_without_structured_output_starts_nothing(log: Path) -> None:
    async def work(found: Grammars) -> int:
        for body in ({"messages": []}, {"response_format": {"type": "text"}}, {"tools": None}):
            assert await found.problem(CHAT, body, None) is None
        assert await found.problem("/tokenize", regex("spin"), None) is None
        return found._pid

    assert run(work) == 0


def test_a_good_grammar_passes_and_is_compiled_once(log: Path) -> None:
    async def work(found: Grammars) -> None:
        assert (
            await asyncio.gather(*(found.problem(CHAT, regex("a"), None) for _ in range(50)))
            == [None] * 50
        )
        assert await found.problem(CHAT, regex("a"), None) is None

    run(work)
    assert log.read_text() == "a\n"


def test_a_refusal_is_remembered(log: Path) -> None:
    async def work(found: Grammars) -> list[Problem | None]:
        return [await found.problem(CHAT, regex("refuse"), None) for _ in range(3)]

    first, *others = run(work)
    assert "It allows no token at all." in first
    assert first.status == 400
    assert others == [first, first]
    assert log.read_text() == "refuse\n"


def test_the_limit_of_time(log: Path) -> None:
    began = time.monotonic()
    problem = problem_of("spin")
    assert problem is not None
    # 503: a starved machine
    assert problem.status == 503 or "more than 0.5 s" in problem, problem
    assert time.monotonic() - began < 20  # it would spin without end


@pytest.mark.parametrize("act", ["spin", "read slowly"])
def test_a_refusal_for_time_is_forgotten_after_a_while(
    act: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "SLOW_SECONDS", 0.3)

    async def work(found: Grammars) -> list[Problem | None]:
        results = [await found.problem(CHAT, regex(act), None) for _ in range(2)]
        await asyncio.sleep(0.4)
        return [*results, await found.problem(CHAT, regex(act), None)]

    found = run(work, Limits(0.1, 128))
    assert None not in found
    if all(
        problem.status == 400 for problem in found
    ):  # 503 for "spin" on a machine without a free core
        assert log.read_text() == f"{act}\n{act}\n"


def test_a_child_that_gets_no_core_has_more_time(log: Path) -> None:
    """More than its seconds pass, and it uses none of them."""
    assert problem_of("stopped", Limits(0.8, 128)) is None  # it sleeps for 1 s; 2.4 s are its limit


def test_the_tokenizer_is_warmed_in_the_mother(log: Path) -> None:
    assert problem_of("warm?") is None


@pytest.mark.parametrize("act", ["eat", "crash in C", "abort"])
def test_the_limit_of_memory_and_a_crash_cost_that_compile_alone(act: str, log: Path) -> None:
    async def work(found: Grammars) -> tuple[Problem | None, int, int]:
        assert await found.problem(CHAT, regex("a"), None) is None
        before = found._pid
        problem = await found.problem(CHAT, regex(act), None)
        assert await found.problem(CHAT, regex("b"), None) is None
        return problem, before, found._pid

    problem, before, after = run(work, Limits(5, 128))
    assert problem is not None
    assert problem.status == 400
    assert "128 MiB" in problem or "too deeply" in problem or "crashes" in problem
    assert before == after


def test_a_backend_is_built_in_the_mother_when_a_child_needs_it(log: Path) -> None:
    assert problem_of("needs") is None
    assert log.read_text() == "needs\nneeds\n"


def test_a_killed_worker_is_replaced(log: Path) -> None:
    async def work(found: Grammars) -> None:
        assert await found.problem(CHAT, regex("a"), None) is None
        first = found._pid
        waiting = asyncio.ensure_future(found.problem(CHAT, regex("slow"), None))
        await asyncio.sleep(0.05)
        os.kill(first, signal.SIGKILL)
        problem = await waiting
        assert problem is not None
        assert problem.status == 503
        assert await found.problem(CHAT, regex("slow"), None) is None  # what failed is asked again
        assert found._pid != first

    run(work)


def test_a_stopped_worker_does_not_take_the_next_one_with_it(log: Path) -> None:
    async def work(found: Grammars) -> None:
        assert await found.problem(CHAT, regex("a"), None) is None
        found._stop()
        waiting = asyncio.ensure_future(found.problem(CHAT, regex("slow"), None))
        assert await waiting is None

    run(work)


def test_too_many_different_grammars_at_a_time_are_refused_with_503(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "WAITING", 32)

    async def work(found: Grammars) -> list[Problem | None]:
        return await asyncio.gather(
            *(found.problem(CHAT, regex(f"r{i}"), None) for i in range(32 + 8))
        )

    found = run(work)
    assert [problem.status for problem in found if problem] == [503] * 8


def test_a_compile_that_has_no_turn_in_time_is_refused_with_503(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "PATIENCE_SECONDS", 0.8)

    async def work(found: Grammars) -> list[Problem | None]:
        await found.problem(CHAT, regex("a"), None)
        spinning = [
            asyncio.ensure_future(found.problem(CHAT, {**regex("spin"), "ignore_eos": n}, None))
            for n in range(8)
        ]
        while "spin" not in log.read_text():
            await asyncio.sleep(0.01)
        return [await found.problem(CHAT, regex("late"), None), *await asyncio.gather(*spinning)]

    late, *_ = run(work, Limits(2, 128))
    assert late is not None
    assert late.status == 503
    assert "late" not in log.read_text()


def test_the_event_loop_runs_on_while_something_compiles(log: Path) -> None:
    async def work(found: Grammars) -> int:
        await found.problem(CHAT, regex("a"), None)
        waiting = asyncio.ensure_future(found.problem(CHAT, regex("spin"), None))
        turns = 0
        while not waiting.done():
            await asyncio.sleep(0.01)
            turns += 1
        return turns

    assert run(work) > 5  # 1 or 2 where the loop waits for the half second of the compiler


def test_requests_that_vllm_reads_slowly_are_spaced_out(log: Path) -> None:
    async def work(found: Grammars) -> float:
        await found.problem(CHAT, regex("long to read"), None)
        began = time.monotonic()
        await asyncio.gather(*(found.problem(CHAT, regex("long to read"), None) for _ in range(4)))
        return time.monotonic() - began

    assert run(work) >= 4 * 0.05 * 4


def test_a_client_that_leaves_does_not_end_the_compile_of_another(log: Path) -> None:
    async def work(found: Grammars) -> Problem | None:
        first = asyncio.ensure_future(found.problem(CHAT, regex("slow"), None))
        second = asyncio.ensure_future(found.problem(CHAT, regex("slow"), None))
        await asyncio.sleep(0.05)
        first.cancel()
        return await second

    assert run(work) is None
    assert log.read_text() == "slow\n"


def test_the_worker_holds_no_descriptor_of_the_api_process(log: Path) -> None:
    reader, writer = os.pipe()

    async def work(found: Grammars) -> list[str]:
        await found.problem(CHAT, regex("a"), None)
        folder = Path(f"/proc/{found._pid}/fd")
        return [os.readlink(folder / name) for name in os.listdir(folder)]

    held = run(work)
    pipe = os.readlink(f"/proc/self/fd/{reader}")
    os.close(reader)
    os.close(writer)
    assert pipe not in held
    assert sum(link.startswith("socket:") for link in held) == 1


def test_descriptors_that_libuv_closes_in_a_fork_are_not_the_workers(tmp_path: Path) -> None:
    """In a fresh process libuv's pipe of signals gets low numbers, which the worker uses again."""
    program = """
import asyncio, sys, uvloop
from pathlib import Path
from nibble.engine.guard import grammar_worker
from nibble.engine.guard.grammar_fields import CHAT
from nibble.engine.guard.grammars import Grammars
from tests.support.servers.misbehaving import LIMITS, Misbehaving, regex

class Made:
    @staticmethod
    def of_app(app):
        return Misbehaving(Path(sys.argv[1]))

grammar_worker.Compiler = Made

async def main():
    found = Grammars(LIMITS)
    try:
        print(await found.problem(CHAT, regex("a"), None))
    finally:
        found._stop()

uvloop.run(main())
"""
    words = [sys.executable, "-c", program, str(tmp_path / "asked")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT)
    assert done.stdout == "None\n", done.stderr


def test_the_worker_dies_with_the_api_process(log: Path) -> None:
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:  # stands in for the API process
        pid, _ = grammar_worker.start(None, LIMITS)
        os.write(writer, str(pid).encode())
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    pid = int(os.read(reader, 16))
    os.waitpid(parent, 0)
    deadline = time.monotonic() + 5
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.close(reader)
    os.close(writer)
    assert not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """The worker needs none in the API process."""
    before = threading.active_count()
    yield
    assert threading.active_count() == before


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.mark.parametrize(
    ("path", "body", "found"),
    [
        (CHAT, {"n": 1, "messages": []}, None),
        (CHAT, {"response_format": {"type": "text"}, "tool_choice": "none"}, None),
        (CHAT, {"structured_outputs": 0}, {"structured_outputs": 0}),
        (CHAT, {"response_format": SCHEMA, "n": 2}, {"response_format": SCHEMA}),
        (
            CHAT,
            {"tools": TOOLS, "tool_choice": "required"},
            {"tools": TOOLS, "tool_choice": "required"},
        ),
        (BATCH, {"response_format": SCHEMA}, {"response_format": SCHEMA}),
        (COMPLETIONS, {"prompt": "x", "response_format": SCHEMA}, {"response_format": SCHEMA}),
        (COMPLETIONS, {"prompt": "x", "tools": TOOLS}, None),
        (RESPONSES, {"input": "x", "text": {"format": {}}}, {"text": {"format": {}}}),
        (
            MESSAGES,
            {"messages": "x", "output_config": {"format": {}}},
            {"output_config": {"format": {}}},
        ),
        ("/tokenize", {"tools": TOOLS}, None),
    ],
)
def test_fields_that_make_a_grammar(path: str, body: dict[str, Any], found: Any) -> None:
    assert grammar_fields(path, body) == found


def test_tools_that_messages_declare() -> None:
    addition = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {}}}
    messages = [
        {"role": "user", "content": "long text"},
        {"role": "system", "content": [{"type": "text", "text": "t"}, addition]},
    ]
    found = grammar_fields(MESSAGES, {"messages": messages})
    assert found == {"messages": [{"role": "system", "content": [addition]}]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [("x" * (1 << 20), "expected at most 1048576"), ([[]], None)],
    ids=["large", "nested"],
)
def test_what_is_too_large_or_too_deep_is_not_even_compiled(
    text: Any, reason: str | None, log: Path
) -> None:
    if reason is None:
        for _ in range(5000):
            text = [text]
        reason = "nest too deeply"
    problem = problem_of(text)
    assert problem is not None
    assert reason in problem
    assert log.read_text() == ""


def test_results_are_bounded(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "REMEMBERED", 3)

    async def work(found: Grammars) -> int:
        for text in "abcdea":
            assert await found.problem(CHAT, regex(text), None) is None
        return len(found._results)

    assert run(work) == 3
    assert log.read_text().split() == [*"abcdea"]
