"""Several models on one port: the real router, gate and loop, with stand-ins for the engines."""

from __future__ import annotations

import http.client
import json
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nibble.engine.gate.admission import Admission
from nibble.engine.guard.limits import RequestLimits
from nibble.engine.process import Stop
from nibble.engine.router.app import Router
from nibble.engine.router.front import Front
from nibble.engine.router.table import Entry, Table
from nibble.errors import ExitCode, NibbleError
from nibble.serve.fleet import fleet as fleet_module
from nibble.serve.fleet.budgets import Share
from nibble.serve.fleet.fleet import Fleet, Member, pause_s
from nibble.serve.fleet.report import Report
from tests.support.servers.stand_in_engine import StandInEngine

KEY = "nbl-a-key-of-the-test"


class Running:
    """A fleet in threads. `engines` has every engine that was started, in order."""

    def __init__(
        self,
        folder: Path,
        sizes: dict[str, int],
        allowed: int,
        stays: bool,
        wait_s: float = 20,
        max_waiting: int = 4,
        key: str = "",
        engine: Callable[..., StandInEngine] = StandInEngine,
    ) -> None:
        events: queue.SimpleQueue[Stop | None] = queue.SimpleQueue()
        entries = [Entry(name, (f"alias-{name}", name)) for name in sizes]
        self.table = Table(entries, lambda: events.put(None), wait_s, max_waiting)
        self.events = events
        self.engines: list[StandInEngine] = []
        self.said: list[str] = []

        def start(*args: Any) -> Any:
            self.engines.append(engine(*args))
            return self.engines[-1]

        members = [
            Member(entry, Share(entry.model, 0, size, stays), [entry.model], {})
            for entry, size in zip(entries, sizes.values(), strict=True)
        ]
        self.admission = Admission(folder / "gate")
        self.fleet = Fleet(
            members, allowed, self.table, events, 5, self.said.append, start,
            on_drain=lambda: self.admission.set("draining", "drain"),
        )  # fmt: skip
        environ = {"NIBBLE_GATE_STATE": str(folder / "gate"), "NIBBLE_API_KEY": key}
        limits = RequestLimits.from_environ({"NIBBLE_MAX_BODY_BYTES": "1000000"})
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        router = Router(self.table, limits, "0.32.0")
        self.front = Front(listener, router, environ, self.fleet.missing)
        self.report = Report(self.fleet, "http://127.0.0.1")
        self.front.start()
        self.admission.set("ready", "")
        self.code: int | None = None
        self.error: NibbleError | None = None
        self._loop = threading.Thread(target=self._run, daemon=True)
        self._loop.start()

    def _run(self) -> None:
        try:
            self.code = self.fleet.run(self.front)
        except NibbleError as error:
            self.error = error

    def stop(self) -> int | None:
        self.events.put(Stop(signal.SIGTERM))
        self._loop.join(10)
        return self.code

    def end(self) -> None:
        self.stop()
        self.fleet.close()
        self.front.stop()
        self.admission.close()

    def request(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(
                method,
                path,
                body,
                {"Content-Type": "application/json"}
                | {name.replace("_", "-"): value for name, value in headers.items()},
            )
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def ask(self, model: str | None, **more: Any) -> tuple[int, Any]:
        body = ({"model": model} if model else {}) | more
        status, _, text = self.request("POST", "/v1/completions", json.dumps(body).encode())
        return status, json.loads(text)

    def wait_for(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not done():
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def running(self, name: str) -> StandInEngine:
        return next(one for one in reversed(self.engines) if one.name == name)


@pytest.fixture(autouse=True)
def without_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop runs in a thread here, where signals cannot be handled; it turns fast."""
    import contextlib

    monkeypatch.setattr(fleet_module, "stop_signals", lambda tell: contextlib.nullcontext())
    monkeypatch.setattr(fleet_module, "POLL_S", 0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def begin(**options: Any) -> Running:
        settings = {"sizes": {"a": 4, "b": 4}, "allowed": 10, "stays": True} | options
        started.append(Running(tmp_path, **settings))
        return started[-1]

    yield begin
    for one in started:
        one.end()


@pytest.fixture
def together(start: Callable[..., Running]) -> Running:
    return start()


@pytest.fixture
def by_turns(start: Callable[..., Running]) -> Running:
    return start(stays=False, allowed=6)


def test_requests_go_by_model_alias_and_default_and_wait_for_the_load(together: Running) -> None:
    assert together.request("GET", "/ready")[0] == 503
    for name, by in (("a", "a"), ("b", "b"), ("alias-b", "b"), ("default", "a"), (None, "a")):
        assert together.ask(name) == (
            200,
            {"by": by, "n": len(json.dumps({"model": name} if name else {}))},
        )
    assert together.request("GET", "/ready")[0] == 200
    assert [one.name for one in together.engines] == ["a", "b"]


def test_one_engine_loads_at_a_time(together: Running) -> None:
    together.ask("b")
    together.ask("a")
    first, second = together.engines
    assert second.loaded_at - second.load_s >= first.loaded_at


def test_an_unknown_model_gets_404_with_the_names(together: Running) -> None:
    status, answer = together.ask("nope")
    assert status == 404
    assert answer["error"]["message"] == (
        "The model `nope` does not exist. This server has: alias-a, a, alias-b, b, default."
    )


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model": 3}', b"\xff", b""])
def test_a_body_without_a_usable_model_gets_400(together: Running, body: bytes) -> None:
    assert together.request("POST", "/v1/completions", body)[0] == 400


def test_a_form_names_its_model(together: Running) -> None:
    form = (
        b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nmodel\r\n'
        b'--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\nb\r\n--XX--\r\n'
    )
    status, _, text = together.request(
        "POST", "/v1/audio/transcriptions", form, Content_Type="multipart/form-data; boundary=XX"
    )
    assert (status, json.loads(text)["by"]) == (200, "b")


def test_models_lists_every_name_with_its_state(together: Running) -> None:
    together.wait_for(lambda: not together.fleet.missing())
    _, _, text = together.request("GET", "/v1/models")
    listed = {one["id"]: (one["root"], one["state"]) for one in json.loads(text)["data"]}
    assert listed == {
        "alias-a": ("a", "ready"),
        "a": ("a", "ready"),
        "alias-b": ("b", "ready"),
        "b": ("b", "ready"),
        "default": ("a", "ready"),
    }


def test_headers_and_large_bodies_arrive_and_the_internal_header_does_not(
    together: Running,
) -> None:
    body = json.dumps({"model": "a", "prompt": "x" * 500_000}).encode()
    status, _, text = together.request(
        "POST", "/v1/completions?q=1", body, X_Test="kept", X_Nibble_Internal="forged"
    )
    assert (status, json.loads(text)["n"]) == (200, len(body))
    asked = together.running("a").asked[-1]
    assert asked["path"] == "/v1/completions?q=1"
    headers = {name.lower(): value for name, value in asked["headers"].items()}
    assert headers["x-test"] == "kept" and "x-nibble-internal" not in headers
    too_large = json.dumps({"model": "a", "prompt": "x" * 1_100_000}).encode()
    assert together.request("POST", "/v1/completions", too_large)[0] == 413


def test_streams_pass_through_and_end(together: Running) -> None:
    body = json.dumps({"model": "a", "stream": 20}).encode()
    status, headers, text = together.request("POST", "/v1/completions", body)
    assert status == 200 and headers["content-type"] == "text/event-stream"
    assert text.decode().split() == [w for n in range(20) for w in ("data:", str(n))]


def test_a_client_that_leaves_aborts_its_request_in_the_engine(together: Running) -> None:
    together.ask("a")
    body = json.dumps({"model": "a", "stream": 2000}).encode()
    client = socket.create_connection(("127.0.0.1", together.port))
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    assert client.recv(100)
    client.close()
    assert together.running("a").aborted.wait(5)
    together.wait_for(lambda: together.table.entries[0].running == 0)


def test_the_key_is_needed_at_the_port(start: Callable[..., Running]) -> None:
    server = start(key=KEY)
    body = b'{"model": "a"}'
    assert server.request("POST", "/v1/completions", body)[0] == 401
    assert server.request("GET", "/v1/models")[0] == 401
    bearer = {"Authorization": f"Bearer {KEY}"}
    assert server.request("POST", "/v1/completions", body, **bearer)[0] == 200
    assert server.request("POST", "/sleep", body, **bearer)[0] == 404
    assert server.request("GET", "/health")[0] == 200


def test_a_response_is_found_in_the_engine_that_made_it(together: Running) -> None:
    together.wait_for(lambda: not together.fleet.missing())
    assert together.request("GET", "/v1/responses/of-b")[0] == 200
    assert together.request("GET", "/v1/responses/of-c")[0] == 404


def test_metrics_of_all_engines_are_one_valid_text(together: Running) -> None:
    together.wait_for(lambda: not together.fleet.missing())
    _, _, text = together.request("GET", "/metrics")
    found = [s for m in text_string_to_metric_families(text.decode()) for s in m.samples]
    assert {one.labels["engine_model"] for one in found} == {"a", "b"}
    own = text_string_to_metric_families(together.report.metrics())
    states = {(s.labels["model"], s.labels.get("state")): s.value for m in own for s in m.samples}
    assert states["a", "ready"] == states["b", "ready"] == 1


# --- on demand ---


def test_a_model_is_loaded_at_its_first_request_and_the_other_goes(by_turns: Running) -> None:
    assert by_turns.request("GET", "/ready")[0] == 200
    assert not by_turns.engines
    assert [by_turns.ask(name)[1]["by"] for name in ("b", "b", "a", "b")] == ["b", "b", "a", "b"]
    assert [one.name for one in by_turns.engines] == ["b", "a", "b"]
    assert [one.code for one in by_turns.engines] == [0, 0, None]


def test_models_that_fit_both_stay(start: Callable[..., Running]) -> None:
    server = start(stays=False)
    assert [server.ask(name)[1]["by"] for name in ("b", "a", "b", "a")] == ["b", "a", "b", "a"]
    assert len(server.engines) == 2


def test_the_least_used_of_three_goes(start: Callable[..., Running]) -> None:
    server = start(sizes={"a": 4, "b": 4, "c": 4}, stays=False, allowed=9)
    for name in ("a", "b", "a", "c"):
        server.ask(name)
    assert {one.name: one.code for one in server.engines} == {"a": None, "b": 0, "c": None}


def test_a_busy_model_ends_its_requests_first(by_turns: Running) -> None:
    with ThreadPoolExecutor(3) as pool:
        held = pool.submit(by_turns.ask, "a", hold=True)
        by_turns.wait_for(lambda: bool(by_turns.engines and by_turns.engines[0].asked))
        other = pool.submit(by_turns.ask, "b")
        by_turns.wait_for(lambda: by_turns.table.entries[0].is_leaving)
        again = pool.submit(by_turns.ask, "a")  # waits, so that the first becomes idle
        time.sleep(0.2)
        assert by_turns.engines[0].code is None and not other.done() and not again.done()
        by_turns.engines[0].release.set()
        assert [one.result()[1]["by"] for one in (held, other, again)] == ["a", "b", "a"]
    assert [one.name for one in by_turns.engines] == ["a", "b", "a"]


def test_loaded_models_never_exceed_the_machine(start: Callable[..., Running]) -> None:
    server = start(sizes={"a": 4, "b": 3, "c": 5}, stays=False, allowed=8)
    most = 0
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(server.ask, name) for name in "abcabc" for _ in range(2)]
        while not all(one.done() for one in asked):
            alive = [one.share.total_bytes for one in server.fleet.members if one.process]
            most = max(most, sum(alive))
            time.sleep(0.005)
    assert {one.result()[0] for one in asked} == {200}
    assert 5 <= most <= 8


def test_too_many_waiting_requests_and_too_long_waits_get_503(
    start: Callable[..., Running],
) -> None:
    class Slow(StandInEngine):
        load_s = 30.0

    server = start(stays=False, wait_s=0.5, engine=Slow)
    with ThreadPoolExecutor(5) as pool:
        answers = [one.result() for one in [pool.submit(server.ask, "a") for _ in range(5)]]
    messages = sorted(one[1]["error"]["message"] for one in answers)
    assert {one[0] for one in answers} == {503}
    assert messages[-1] == "Too many requests wait for the model a."
    assert messages[:4] == ["The model a was not loaded within 0 s."] * 4
    entry = server.table.entries[0]
    assert (len(entry.waiters), entry.running) == (0, 0)


# --- failures ---


def test_a_crash_takes_only_its_own_model_down_and_it_comes_back(together: Running) -> None:
    together.ask("a")
    together.ask("b")
    together.running("a").crash(10)
    assert together.ask("b")[0] == 200
    together.wait_for(lambda: len(together.engines) == 3)
    assert together.ask("a") == (200, {"by": "a", "n": 14})
    assert any("a ended: its server ended with code 10" in line for line in together.said)


def test_an_engine_that_ends_within_a_request_is_503_for_it(together: Running) -> None:
    together.ask("a")
    status, answer = together.ask("a", crash=True)
    assert status == 503 and "ended before it answered" in answer["error"]["message"]
    assert together.ask("a")[0] == 200


def test_a_model_that_cannot_load_is_named_and_the_others_serve(
    start: Callable[..., Running],
) -> None:
    class Refuses(StandInEngine):
        def ended_with(self) -> int | None:
            if self.name == "a":
                self.error = "the model is not complete"
                self.crash(4)
            return self.code

    server = start(engine=Refuses)
    assert server.ask("b")[0] == 200
    status, answer = server.ask("a")
    assert status == 503
    assert answer["error"]["message"] == (
        "The model a is not available: the model is not complete."
    )
    problems = server.report.live()["problems"]
    assert [(one["level"], one["what"]) for one in problems] == [
        ("red", "a: the model is not complete")
    ]


def test_no_model_can_be_loaded(start: Callable[..., Running]) -> None:
    class Refuses(StandInEngine):
        load_s = 0.0
        ends_at_load_with = 75

    server = start(engine=Refuses)
    server.wait_for(lambda: server.error is not None)
    assert server.error is not None and server.error.code == ExitCode.CRASH_LOOP
    assert "a: its server ended with code 75; b:" in server.error.line()


def test_pauses_between_starts_grow() -> None:
    assert [pause_s(n) for n in range(1, 9)] == [0, 5, 10, 20, 40, 80, 160, 300]


# --- status and the end ---


def test_status_has_each_model(together: Running) -> None:
    together.wait_for(lambda: not together.fleet.missing())
    status = together.report.status()
    assert (status["state"], status["allowed_bytes"], status["planned_bytes"]) == ("ready", 10, 8)
    assert [(one["model"], one["state"]) for one in status["models"]] == [
        ("a", "ready"),
        ("b", "ready"),
    ]


def test_a_stop_lets_running_requests_end_and_refuses_others(together: Running) -> None:
    together.ask("a")
    together.ask("b")

    engine = together.running("a")
    engine.terminate = lambda: None  # type: ignore[method-assign]  # it drains
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(together.ask, "a", hold=True)
        together.wait_for(lambda: together.table.entries[0].running == 1)
        together.events.put(Stop(signal.SIGTERM))
        together.wait_for(lambda: together.fleet.is_draining)
        status, answer = together.ask("b")
        assert status == 503 and answer["error"]["state"] == "draining"
        engine.release.set()
        assert held.result()[0] == 200
    engine.crash(0)
    together.wait_for(lambda: together.code is not None)
    assert together.code == 0
