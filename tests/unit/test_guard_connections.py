"""The limits on connections, heads and bodies, over real sockets and uvicorn."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect as connect_websocket

from nibble.engine.guard import protocol
from nibble.plan.guard_limits import MEDIA_BODY_BYTES
from tests.support.processor_time import with_neighbours
from tests.support.servers.guarded_server import KEY, GuardedServer, guarded_server, post, read_all

LIMITS = {
    "NIBBLE_HEAD_SECONDS": "1",
    "NIBBLE_BODY_GAP_SECONDS": "1",
    "NIBBLE_BODY_SECONDS": "3",
    "NIBBLE_MAX_BODY_BYTES": str(1 << 20),
    "NIBBLE_MAX_CONNECTIONS": "40",
    "NIBBLE_MAX_CONNECTIONS_PER_ADDRESS": "30",
}
KEEP_ALIVE_S = 1
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
HEAD = (
    f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type:"
    " application/json\r\n"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedServer]:
    folder = tmp_path_factory.mktemp("guarded")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            **LIMITS,
            "NIBBLE_API_KEY": KEY,
            "NIBBLE_GATE_STATE": str(folder / "gate"),
        }.items():
            patch.setenv(name, value)
        with guarded_server(folder, timeout_keep_alive=KEEP_ALIVE_S) as running:
            yield running


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def error(answer: bytes) -> dict[str, object]:
    found = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert found["code"] == status(answer)
    return found


def closed_after(connection: socket.socket) -> tuple[bytes, float]:
    """What came until the server closed, and how long that took."""
    began = time.monotonic()
    connection.settimeout(10)
    return read_all(connection), time.monotonic() - began


def test_a_sound_request_passes(server: GuardedServer) -> None:
    body = json.dumps({"prompt": "hello", "n": 2}).encode()
    answer = server.ask(post(body))
    assert status(answer) == 200 and f'"bytes":{len(body)}'.encode() in answer


@pytest.mark.parametrize("with_key", [True, False])
@pytest.mark.parametrize(
    "headers",
    [
        b"X-Long: " + b"x" * (8 << 20),
        b"x" * (8 << 20),
        b"".join(b"a%d: b\r\n" % n for n in range(200_000)),
    ],
    ids=["one of 8 MiB", "a name of 8 MiB", "200,000"],
)
def test_large_headers_get_431_at_once(
    server: GuardedServer, headers: bytes, with_key: bool
) -> None:
    key = f"Authorization: Bearer {KEY}\r\n".encode() if with_key else b""
    began = time.monotonic()
    with server.connect() as connection:
        with contextlib.suppress(OSError):
            connection.sendall(b"GET /health HTTP/1.1\r\n" + key + headers)
        answer, _ = closed_after(connection)
    assert status(answer) == 431 and "NIBBLE_MAX_HEADER" in str(error(answer)["message"])
    assert b"connection: close" in answer
    assert time.monotonic() - began < 5
    assert status(server.ask(HEALTH)) == 200


def test_a_long_first_line_gets_431(server: GuardedServer) -> None:
    assert status(server.ask(b"GET /" + b"x" * (1 << 20))) == 431


def test_64_slow_heads_are_closed_in_time(server: GuardedServer) -> None:
    connections = [server.connect() for _ in range(20)]
    began = time.monotonic()
    for number, connection in enumerate(connections):
        if number % 2:
            connection.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
    for _ in range(8):  # a byte now and then does not help
        time.sleep(0.2)
        for connection in connections[1::2]:
            with contextlib.suppress(OSError):
                connection.sendall(b"x")
    answers = [closed_after(connection)[0] for connection in connections]
    assert time.monotonic() - began < 1 + with_neighbours(2.5)
    assert {status(answer) for answer in answers[1::2]} == {408}
    assert set(answers[::2]) == {b""}


@pytest.mark.parametrize("drip", [False, True], ids=["silent", "a byte at a time"])
def test_slow_bodies_are_closed_in_time(server: GuardedServer, drip: bool) -> None:
    connections = [server.connect() for _ in range(20)]
    for connection in connections:
        connection.sendall(f"{HEAD}Content-Length: 1000\r\n\r\n{{".encode())
    began = time.monotonic()
    while drip and time.monotonic() - began < 3.5:
        time.sleep(0.3)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(b" ")
    answers = [closed_after(connection)[0] for connection in connections]
    assert time.monotonic() - began < (3 if drip else 1) + with_neighbours(2)
    assert {status(answer) for answer in answers} == {408}
    assert "body" in str(error(answers[0])["message"])


def test_an_error_that_repeats_the_request_is_cut(server: GuardedServer) -> None:
    answer = server.ask(post(b'{"prompt": "repeat me %s"}' % (b"x" * 500_000)))
    assert status(answer) == 400 and len(answer) < 16_384
    assert str(error(answer)["message"]).endswith("characters cut]")


def test_a_body_over_the_limit_is_413_declared_or_not(server: GuardedServer) -> None:
    declared = f"{HEAD}Content-Length: {1 << 30}\r\n\r\n".encode()
    with server.connect() as connection:
        connection.sendall(declared)
        connection.settimeout(5)
        answer = connection.recv(4096)
        assert status(answer) == 413 and "NIBBLE_MAX_BODY_BYTES" in str(error(answer)["message"])
        assert closed_after(connection)[1] < 4
    chunk = b"%x\r\n%s\r\n" % (1 << 16, b" " * (1 << 16))
    assert (
        status(server.ask(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * 40)) == 413
    )
    assert all(size <= 1 << 20 for size in server.app.state.bodies)


def test_a_body_without_the_key_is_refused_unread_and_its_connection_closed(
    server: GuardedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.5)  # and not NIBBLE_BODY_SECONDS
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 30}\r\n\r\n".encode()
    with server.connect() as connection:
        connection.sendall(head)
        connection.settimeout(5)
        assert status(connection.recv(4096)) == 401
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 5:
                connection.sendall(b"x" * 100)
                time.sleep(0.1)
        assert time.monotonic() - began < with_neighbours(2)


def test_idle_connections_give_way_to_new_ones(server: GuardedServer) -> None:
    idle = [server.connect() for _ in range(100)]
    began = time.monotonic()
    for _ in range(5):
        assert status(server.ask(HEALTH)) == 200
    assert time.monotonic() - began < with_neighbours(1)
    for connection in idle:
        connection.close()


def test_connections_that_are_being_answered_do_not_give_way(server: GuardedServer) -> None:
    running = []
    for _ in range(30):
        running.append(server.connect())
        running[-1].sendall(post(b'{"stream": true}', "/v1/chat/completions"))
        assert running[-1].recv(12) == b"HTTP/1.1 200"
    answer = server.ask(HEALTH)
    assert status(answer) == 503 and error(answer)["type"] == "ServiceUnavailableError"
    for connection in running:
        connection.settimeout(10)
        assert b"data: 39\n\n" in read_all(connection)
        connection.close()
    assert status(server.ask(HEALTH)) == 200


def test_pipelined_requests_are_answered_however_long_the_first_takes(
    server: GuardedServer,
) -> None:
    stream = post(b"{}", "/v1/chat/completions").replace(b"Connection: close\r\n", b"")
    with server.connect() as connection:
        half = post(b'{"prompt": 1}')
        connection.sendall(stream + half[:-5])
        time.sleep(1.5)  # more than both limits, while the first is answered
        connection.sendall(half[-5:])
        answer, _ = closed_after(connection)
    assert answer.count(b"HTTP/1.1 200") == 2 and b'"bytes":13' in answer


def test_keep_alive_serves_many_requests_and_counts_no_connection_twice(
    server: GuardedServer,
) -> None:
    request = post(b"{}").replace(b"Connection: close\r\n", b"")
    with server.connect() as connection:
        for _ in range(100):
            connection.sendall(request)
            answer = b""
            while b'"bytes":2' not in answer:  # headers and body may come apart
                piece = connection.recv(4096)
                assert piece, answer
                answer += piece
    for _ in range(100):
        assert status(server.ask(HEALTH)) == 200


def test_a_websocket_stays_open_beyond_all_limits(server: GuardedServer) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"ws://127.0.0.1:{server.port}/v1/realtime"
    with connect_websocket(url, additional_headers=headers) as websocket:
        time.sleep(3.5)
        websocket.send("still there?")
        assert websocket.recv(5) == "still there?"
    for _ in range(40):
        with connect_websocket(url, additional_headers=headers):
            pass


def test_a_large_websocket_message_is_refused(server: GuardedServer) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"ws://127.0.0.1:{server.port}/v1/realtime"
    with connect_websocket(url, additional_headers=headers, max_size=None) as websocket:
        websocket.send("x" * (1 << 20))
        assert len(websocket.recv(5)) == 1 << 20
        with contextlib.suppress(ConnectionClosed):
            websocket.send("x" * ((1 << 20) + 1))
        with pytest.raises(ConnectionClosed) as closed:
            websocket.recv(5)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


def test_expect_100_continue_and_chunked_bodies_work(server: GuardedServer) -> None:
    with server.connect() as connection:
        connection.settimeout(5)
        connection.sendall(
            f"{HEAD}Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 100")
        connection.sendall(b"1\r\n{\r\n")
        time.sleep(0.2)
        connection.sendall(b"1\r\n}\r\n0\r\n\r\n")
        assert b'"bytes":2' in connection.recv(4096)


def test_what_is_no_http_gets_a_json_error(server: GuardedServer) -> None:
    assert (
        error(server.ask(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"))["type"]
        == "BadRequestError"
    )


def test_a_drain_closes_what_has_sent_no_whole_request(server: GuardedServer) -> None:
    idle, half, running = server.connect(), server.connect(), server.connect()
    half.sendall(f"{HEAD}Content-Length: 1000\r\n\r\n{{".encode())
    running.sendall(post(b"{}", "/v1/chat/completions"))
    assert running.recv(12) == b"HTTP/1.1 200"
    time.sleep(0.2)
    server.state.set("draining", "drain")
    try:
        assert closed_after(idle)[0] == b""
        answer, took_s = closed_after(half)
        assert status(answer) == 503 and took_s < with_neighbours(0.9)
        running.settimeout(10)
        assert b"data: 39\n\n" in read_all(running)
    finally:
        server.state.set("ready", "ready")
    for connection in (idle, half, running):
        connection.close()


def test_trailers_count_as_headers(server: GuardedServer) -> None:
    """Of a body that is being read, and of one whose request was refused: one long trailer, and
    many.
    """
    chunked = "Transfer-Encoding: chunked\r\n\r\n0\r\n"
    refused = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{chunked}"
    long = {"one": b"X: " + b"x" * (8 << 20), "many": b"a:b\r\n" * 2_000_000}
    for head, expected in ((HEAD + chunked, {431}), (refused, {0, 401})):
        for name, trailers in long.items():
            with server.connect() as connection:
                connection.sendall(head.encode())
                time.sleep(0.05)
                sent, began = 0, time.monotonic()
                with contextlib.suppress(OSError):
                    for start in range(0, len(trailers), 1 << 16):
                        sent += connection.send(trailers[start : start + (1 << 16)])
                found = status(closed_after(connection)[0])
                assert found in expected and time.monotonic() - began < with_neighbours(1.5), name
                assert found == 431 or sent < len(trailers)
    assert status(server.ask(HEALTH)) == 200


def test_small_chunks_and_short_trailers_pass(server: GuardedServer) -> None:
    body = b"1\r\nx\r\n" * 100_000 + b"0\r\nX-Sum: 1\r\nAuthorization: Bearer other\r\n\r\n"
    head = HEAD.replace("application/json", "multipart/form-data").replace(
        "completions", "audio/transcriptions"
    )
    answer = server.ask(
        f"{head}Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + body
    )
    assert status(answer) == 200 and b'"bytes":100000' in answer


def test_a_request_that_ends_after_its_answer_leaves_no_idle_connection(
    server: GuardedServer,
) -> None:
    with server.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
        assert status(connection.recv(4096)) == 401
        connection.sendall(b"12345")
        assert closed_after(connection)[1] < KEEP_ALIVE_S + 1.5


def test_nonsense_behind_a_request_adds_nothing_to_its_answer(server: GuardedServer) -> None:
    stream = post(b"{}", "/v1/chat/completions").replace(b"Connection: close\r\n", b"")
    nonsense = b"\x16\x03nonsense\r\n\r\n"
    for behind in (nonsense, post(b"{}").replace(b"Connection: close\r\n", b"") + nonsense):
        with server.connect() as connection:
            connection.sendall(stream)
            connection.settimeout(5)
            assert connection.recv(12) == b"HTTP/1.1 200"
            connection.sendall(behind)
            assert b"HTTP/1.1" not in closed_after(connection)[0]


def test_a_large_image_reaches_a_model_that_takes_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the limit of the plan for such a model, on a connection that is slower than the
    limits of 1 s.
    """
    limits = {
        "NIBBLE_MAX_BODY_BYTES": str(MEDIA_BODY_BYTES),
        "NIBBLE_GATE_STATE": str(tmp_path / "gate"),
    }
    for name, value in {
        **LIMITS,
        **limits,
        "NIBBLE_API_KEY": KEY,
        "NIBBLE_BODY_SECONDS": "30",
    }.items():
        monkeypatch.setenv(name, value)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (40 << 20)}}
    body = json.dumps({"messages": [{"role": "user", "content": [image]}]}).encode()
    request = post(body)
    with guarded_server(tmp_path) as server, server.connect() as connection:
        for start in range(0, len(request), 10 << 20):
            connection.sendall(request[start : start + (10 << 20)])
            time.sleep(0.4)
        answer, _ = closed_after(connection)
    assert status(answer) == 200 and f'"bytes":{len(body)}'.encode() in answer


def test_the_limits_hold_under_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        **LIMITS,
        "NIBBLE_API_KEY": KEY,
        "NIBBLE_GATE_STATE": str(tmp_path / "gate"),
    }.items():
        monkeypatch.setenv(name, value)
    certificate, secret = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    subprocess.run(
        [*words, "-keyout", secret, "-out", certificate], check=True, capture_output=True
    )
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with guarded_server(tmp_path, ssl_certfile=str(certificate), ssl_keyfile=str(secret)) as server:

        def ask(data: bytes) -> bytes:
            with context.wrap_socket(server.connect()) as connection:
                connection.sendall(data)
                with contextlib.suppress(ssl.SSLError):
                    return read_all(connection)
            return b""

        assert b'"bytes":2' in ask(post(b"{}"))
        assert status(ask(b"GET /" + b"x" * (1 << 17))) == 431
        began = time.monotonic()
        assert status(ask(b"GET /health HTTP/1.1\r\n")) == 408
        assert time.monotonic() - began < 5
