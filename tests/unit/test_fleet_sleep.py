"""Models that sleep instead of ending: which ones may, their memory, and the way to and fro."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nibble.engine.gate.sleep import SLEEP_PATH, WAKE_PATH, sleep_or_wake
from nibble.serve.above import internal_token
from nibble.serve.fleet.budgets import Share
from nibble.serve.fleet.unloading import Sleeper, choose_ways, obstacle
from tests.support.servers.stand_in_engine import StandInEngine
from tests.unit.test_fleet_routing import Running, start, without_signals  # noqa: F401 - fixtures

GIB = 1 << 30


def sleeper(kept: int = 1, host: int = 4, **more: Any) -> Sleeper:
    facts = {"target": "hopper", "memory_kind": "discrete", "ranks": 1} | more
    return Sleeper(kept_bytes=kept * GIB, host_bytes=host * GIB, **facts)


def share(model: str, total: int, stays: bool = False) -> Share:
    return Share(model, GIB, total * GIB, stays)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"memory_kind": "host", "target": "cpu"}, "vLLM has no sleep mode on a CPU"),
        ({"memory_kind": "unified", "target": "gb10"}, "share one memory"),
        ({"ranks": 2}, "models on one GPU"),
        ({"host": 0}, "size of its weights"),
        ({}, ""),
    ],
)
def test_where_sleep_frees_nothing_the_reason_is_named(facts: dict[str, Any], why: str) -> None:
    found = obstacle(sleeper(**facts))
    assert why in found and bool(why) == bool(found)


def ways(
    shares: list[Share], sleepers: dict[str, Sleeper], allowed: int, host: int, wish: Any = "sleep"
) -> dict[str, str]:
    found = choose_ways(shares, sleepers, wish, allowed * GIB, host * GIB)
    return {one.model: one.unloading for one in found}


def test_a_model_sleeps_where_that_is_asked_for_or_tested() -> None:
    shares, sleepers = [share("a", 8), share("b", 2, True)], {"a": sleeper(), "b": sleeper()}
    found = ways(shares, sleepers, 12, 100)
    assert found["b"] == "never" and found["a"].startswith("sleep: 4.0 GiB of weights go to host")
    assert ways(shares, sleepers, 12, 100, "auto")["a"].startswith("sleep: ")
    assert ways(shares, sleepers, 12, 100, "stop")["a"] == "stop: NIBBLE_UNLOAD=stop"
    sleepers = {"a": sleeper(target="sm120"), "b": sleeper(target="sm120")}
    assert ways(shares, sleepers, 12, 100)["a"].startswith("sleep: ")
    auto = ways(shares, sleepers, 12, 100, "auto")["a"]
    assert auto.startswith("stop: sleep mode has not been tested on sm120")


def test_models_sleep_only_while_every_other_fits_beside_them() -> None:
    shares = [share("a", 8), share("b", 9), share("c", 8)]
    sleepers = {"a": sleeper(1), "b": sleeper(2), "c": sleeper(1)}
    assert all(way.startswith("sleep") for way in ways(shares, sleepers, 11, 100).values())
    found = ways(shares, sleepers, 10, 100)  # b needs 9 beside 1 + 1; without b, a has 8 beside 1
    assert found["b"].startswith("stop: ") and "would not fit beside" in found["b"]
    few = ways(shares, sleepers, 11, 9)  # two of 4 GiB fit in host memory
    assert sorted(way.partition(":")[0] for way in few.values()) == ["sleep", "sleep", "stop"]
    assert any("would sleep in host memory" in way for way in few.values())


def sleeping(start: Callable[..., Running], **options: Any) -> Running:  # noqa: F811
    running = start(sizes={"a": 6, "b": 6}, allowed=8, stays=False, **options)
    for member in running.fleet.members:
        member.share = Share(member.entry.model, 0, 6, False, sleeps=True, asleep_bytes=2)
    return running


def test_a_model_sleeps_for_another_and_wakes_at_its_next_request(
    start: Callable[..., Running],  # noqa: F811
) -> None:
    running = sleeping(start)
    assert running.ask("a")[1]["by"] == "a"
    assert running.ask("b")[1]["by"] == "b"
    states = {one["model"]: one["state"] for one in running.report.status()["models"]}
    assert states == {"a": "asleep", "b": "ready"}
    assert running.report.status()["planned_bytes"] == 8
    assert running.ask("a")[1]["by"] == "a"
    assert len(running.engines) == 2 and all(one.code is None for one in running.engines)
    assert running.running("a").turns == ["sleep", "wake"]
    assert running.running("b").turns == ["sleep"]
    assert 'nibble_model_state{model="b",state="asleep"} 1' in running.report.metrics()


def test_memory_on_paper_never_exceeds_the_machine_while_models_sleep(
    start: Callable[..., Running],  # noqa: F811
) -> None:
    running = sleeping(start)
    most = 0
    for name in ("a", "b", "a", "b", "b", "a"):
        running.ask(name)
        taken = sum(one.taken_bytes for one in running.fleet.members if one.process is not None)
        most = max(most, taken)
    assert most == running.fleet.allowed_bytes


def test_an_engine_that_does_not_fall_asleep_ends(start: Callable[..., Running]) -> None:  # noqa: F811
    class Restless(StandInEngine):
        sleep_problem = "RuntimeError: cumem"

    running = sleeping(start, engine=Restless)
    running.ask("a")
    assert running.ask("b")[1]["by"] == "b"
    assert running.running("a").code == 0
    assert any("a did not sleep (RuntimeError: cumem)" in line for line in running.said)
    assert running.ask("a")[1]["by"] == "a" and len(running.engines) == 3


def test_an_engine_that_does_not_wake_is_started_again(start: Callable[..., Running]) -> None:  # noqa: F811
    class Deep(StandInEngine):
        wake_problem = "EngineDeadError"

    running = sleeping(start, engine=Deep)
    running.ask("a")
    running.ask("b")
    assert running.ask("a")[1]["by"] == "a"  # by a new engine
    assert [one.name for one in running.engines] == ["a", "b", "a"]
    assert any("a did not wake up (EngineDeadError)" in line for line in running.said)


def test_a_sleeping_engine_that_dies_is_loaded_at_the_next_request(
    start: Callable[..., Running],  # noqa: F811
) -> None:
    running = sleeping(start)
    running.ask("a")
    running.ask("b")
    running.running("a").crash(10)
    running.wait_for(lambda: running.fleet.members[0].entry.state == "unloaded")
    assert running.ask("a")[1]["by"] == "a" and len(running.engines) == 3


class Client:
    """vLLM's client of the engine."""

    def __init__(self, is_awake: bool = True) -> None:
        self.is_awake, self.levels = is_awake, []

    async def sleep(self, level: int) -> None:
        self.levels.append(level)

    async def wake_up(self) -> bool:
        return self.is_awake


def test_the_gate_asks_the_engines_client_and_says_what_failed() -> None:
    def turn(client: Any, path: str) -> str:
        app = SimpleNamespace(state=SimpleNamespace(engine_client=client))
        return asyncio.run(sleep_or_wake(app, path))

    client = Client()
    assert turn(client, SLEEP_PATH) == turn(client, WAKE_PATH) == "" and client.levels == [1]
    assert turn(Client(False), WAKE_PATH) == "a part of the engine still sleeps"
    assert turn(object(), SLEEP_PATH).startswith("AttributeError")


def test_only_the_server_of_several_models_gives_the_token() -> None:
    given = {"NIBBLE_GATE_INTERNAL": "token"}
    assert internal_token(given | {"NIBBLE_WATCHED_ABOVE": "1"}) == "token"
    assert internal_token(given) != "token" and len(internal_token({})) > 30
