"""What the supervisor asks the server, against a small HTTP server of ours."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from nibble.engine.api import (
    Api,
    answer_one_token,
    lists_models,
    reachable_host,
    requests_in_flight,
)
from nibble.errors import ExitCode, NibbleError

MODELS = json.dumps({"data": [{"id": "org/model"}, {"id": "default"}]})
# Two engines of one server (data parallel), in the form of vllm 0.32's /metrics.
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="slow"} 2.0
vllm:num_requests_running{engine="1",model_name="slow"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="slow"} 4.0
vllm:num_requests_waiting{engine="1",model_name="slow"} 0.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="slow",reason="capacity"} 4.0
"""


class Fake(ThreadingHTTPServer):
    """Answers by path; `seen` keeps (path, internal header, body)."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, tuple[int, str]] = {}
        self.seen: list[tuple[str, str | None, Any]] = []


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def do_GET(self) -> None:
        self._reply(None)

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, body: Any) -> None:
        self.server.seen.append((self.path, self.headers.get("x-nibble-internal"), body))
        status, text = self.server.answers.get(self.path, (404, "{}"))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Fake]:
    server = Fake()
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    ).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def api(server: Fake) -> Api:
    return Api("127.0.0.1", server.server_address[1], "our-pass")


def test_every_served_name_has_to_be_listed(server: Fake, api: Api) -> None:
    server.answers["/v1/models"] = (200, MODELS)
    assert lists_models(api, ["org/model", "default"])
    assert not lists_models(api, ["org/model", "other"])


@pytest.mark.parametrize("answer", [(503, "{}"), (200, "no JSON"), (200, "{}"), (401, MODELS)])
def test_anything_but_a_list_is_not_ready_yet(
    server: Fake, api: Api, answer: tuple[int, str]
) -> None:
    server.answers["/v1/models"] = answer
    assert not lists_models(api, ["default"])


def test_a_server_that_does_not_listen_is_not_ready_yet() -> None:
    assert not lists_models(Api("127.0.0.1", 1, "our-pass"), ["default"])


def test_our_requests_carry_the_pass_through_the_gate(server: Fake, api: Api) -> None:
    server.answers["/v1/completions"] = (200, "{}")
    answer_one_token(api, "default")
    path, passed, body = server.seen[0]
    assert (path, passed, body["model"], body["max_tokens"]) == (
        "/v1/completions",
        "our-pass",
        "default",
        1,
    )


def test_a_refused_first_token_is_a_failed_canary_with_the_servers_words(
    server: Fake, api: Api
) -> None:
    server.answers["/v1/completions"] = (500, '{"error": "out of\n luck"}')
    with pytest.raises(NibbleError, match=r'got status 500: \{"error": "out of luck"\}') as caught:
        answer_one_token(api, "default")
    assert caught.value.code == ExitCode.CANARY


def test_a_server_whose_tasks_are_unknown_may_lack_the_completions_route(api: Api) -> None:
    answer_one_token(api, "default", required=False)
    with pytest.raises(NibbleError):
        answer_one_token(api, "default", required=True)


def test_running_and_waiting_requests_of_all_engines_are_counted_once(
    server: Fake, api: Api
) -> None:
    server.answers["/metrics"] = (200, METRICS)
    assert requests_in_flight(api) == 7


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ('vllm:num_requests_running{model_name="a}b \\"c\\" 7",engine="0"} 2 1700000000000\n', 2),
        ("vllm:num_requests_running 3\nvllm:num_requests_waiting NaN\n", 3),
        ("vllm:num_requests_running many\n", None),
    ],
)
def test_any_prometheus_text_is_read_and_other_text_is_not_known(
    page: str, found: int | None, server: Fake, api: Api
) -> None:
    server.answers["/metrics"] = (200, page)
    assert requests_in_flight(api) == found


def test_without_metrics_the_number_of_requests_is_unknown(server: Fake, api: Api) -> None:
    assert requests_in_flight(api) is None
    server.answers["/metrics"] = (200, "# nothing\n")
    assert requests_in_flight(api) is None
    assert requests_in_flight(Api("127.0.0.1", 1, "our-pass")) is None


@pytest.mark.parametrize(
    ("bound", "reached", "url"),
    [
        ("0.0.0.0", "127.0.0.1", "http://127.0.0.1:8000"),
        ("::", "::1", "http://[::1]:8000"),
        ("192.0.2.7", "192.0.2.7", "http://192.0.2.7:8000"),
        ("localhost", "localhost", "http://localhost:8000"),
    ],
)
def test_a_bound_address_is_reached_where_this_machine_reaches_it(
    bound: str, reached: str, url: str
) -> None:
    assert reachable_host(bound) == reached
    assert Api(reached, 8000, "our-pass").url == url
