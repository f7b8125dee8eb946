"""The control port: what it answers, to whom, and what happens when it is taken."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator

import pytest

from nibble.errors import ExitCode, NibbleError
from nibble.serve.control import ControlServer


class Source:
    ready = False
    status = {"phase": "load", "progress": 0.5}  # noqa: RUF012


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def server(source: Source) -> Iterator[ControlServer]:
    server = ControlServer(0, lambda: source.status, lambda: source.ready)
    server.start()
    yield server
    server.close()


def get(
    server: ControlServer, path: str, host: str | None = None, method: str = "GET"
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request(method, path, headers={"Host": host} if host else {})
    response = connection.getresponse()
    answer = response.status, response.read()
    connection.close()
    return answer


def test_status_answers_the_current_status_as_json(server: ControlServer) -> None:
    status, body = get(server, "/status")
    assert (status, json.loads(body)) == (200, {"phase": "load", "progress": 0.5})


def test_ready_is_503_until_ready_and_200_then(server: ControlServer, source: Source) -> None:
    assert get(server, "/ready")[0] == 503
    source.ready = True
    assert get(server, "/ready")[0] == 200


def test_head_of_ready_serves_health_checkers_without_a_body(server: ControlServer) -> None:
    assert get(server, "/ready", method="HEAD") == (503, b"")


@pytest.mark.parametrize(
    "path", ["/status/", "/v1/models", "/nibble/", "/nibble/page.py", "/../etc/passwd"]
)
def test_other_paths_are_404(server: ControlServer, path: str) -> None:
    assert get(server, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed_through_it(server: ControlServer, method: str) -> None:
    assert get(server, "/status", method=method)[0] == 501


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8001", "127.0.0.1.evil.example", "localhost.evil:8001"]
)
def test_a_foreign_host_name_is_refused_against_dns_rebinding(
    server: ControlServer, host: str
) -> None:
    status, body = get(server, "/status", host=host)
    assert status == 403
    assert b"phase" not in body


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8001", "127.0.0.1", "127.0.0.1:9", "LOCALHOST:1"]
)
def test_local_host_names_are_served(server: ControlServer, host: str) -> None:
    assert get(server, "/status", host=host)[0] == 200


def test_it_listens_on_loopback_only(server: ControlServer) -> None:
    table = open("/proc/net/tcp").read()  # noqa: SIM115
    wanted = f":{server.port:04X}"
    listening = [line.split()[1] for line in table.splitlines()[1:] if line.split()[3] == "0A"]
    assert [address for address in listening if address.endswith(wanted)] == [f"0100007F{wanted}"]


def test_a_control_port_in_use_is_one_line_that_names_the_variable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(NibbleError) as caught:
            ControlServer(taken.getsockname()[1], dict, lambda: False)
    assert caught.value.code == ExitCode.CONFIG
    assert "NIBBLE_CONTROL_PORT" in caught.value.line()
    assert "Address already in use" in caught.value.line()
