"""Transfer speed of a node's agent (Python's http.server) and of the same server on uvicorn.

    python benchmarks/agent_transfer.py [--gib 1] [--repeats 5]
        [--out benchmarks/results/agent_transfer.json]

Each server in turn sends one file in memory over loopback. The result has MB/s, and the server's
CPU seconds per GiB, which it takes from vLLM. It also records how each server handles a
Content-Length of -1, and a client that sends half a request and then nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import psutil  # noqa: E402
from machine import machine  # noqa: E402

from nibble.cluster import agent  # noqa: E402
from nibble.cluster.file_server import CHUNK_BYTES, Offers  # noqa: E402

TOKEN = "benchmark"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
NAME = "model.safetensors"
SILENCE_S = 45.0  # the agent ends a silent connection after 30 s
# What FileResponse reads at once: its default, and the agent's size of a piece.
SERVERS = {"agent": 0, "uvicorn, h11, 64 KiB": 64 << 10, "uvicorn, httptools, 4 MiB": CHUNK_BYTES}


def serve(name: str, port: int, folder: Path) -> None:
    """Run one server until this process is killed. All answer below /files/."""
    if name == "agent":
        agent.AGENT_PORT = port
        offers = Offers()
        offers.add(folder)
        agent.Agent("127.0.0.1", TOKEN, offers.handlers(), offers.senders()).start()
        time.sleep(3600)
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import FileResponse, JSONResponse, Response
    from starlette.routing import Route

    class Pieces(FileResponse):
        chunk_size = SERVERS[name]

    async def file(request: Request) -> Response:
        return Pieces(folder / request.path_params["path"])

    async def model(request: Request) -> Response:
        await request.body()
        return JSONResponse({})

    routes = [Route("/files/{name}/{path}", file), Route("/model", model, methods=["POST"])]
    protocol = "h11" if "h11" in name else "httptools"
    options: dict[str, Any] = {"log_level": "critical", "access_log": False, "http": protocol}
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=port, **options)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[dict[str, tuple[int, int]]]:
    """Every server in a separate process: name -> (port, pid)."""
    started, found = [], {}
    for name in SERVERS:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = multiprocessing.Process(target=serve, args=(name, port, folder), daemon=True)
        process.start()
        assert process.pid is not None
        started.append(process)
        found[name] = (port, process.pid)
    try:
        for port, _ in found.values():
            deadline = time.monotonic() + 60
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert time.monotonic() < deadline, "a server does not start"
                time.sleep(0.1)
        yield found
    finally:
        for process in started:
            process.kill()
            process.join()


def transfer(port: int, pid: int, path: str, size: int) -> tuple[float, float]:
    """(MB/s, CPU seconds of the server per GiB)."""
    before, began, count = sum(psutil.Process(pid).cpu_times()[:2]), time.perf_counter(), 0
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers=HEADERS)
    response, buffer = connection.getresponse(), bytearray(CHUNK_BYTES)
    while read := response.readinto(buffer):
        count += read
    took_s = time.perf_counter() - began
    connection.close()
    assert (response.status, count) == (200, size)
    cpu_s = sum(psutil.Process(pid).cpu_times()[:2]) - before
    return size / took_s / 1e6, cpu_s / size * (1 << 30)


def status_of_a_negative_length(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/model", b"{}", {**HEADERS, "Content-Length": "-1"})
    status = connection.getresponse().status
    connection.close()
    return status


def silence_s(port: int) -> float | None:
    """Seconds until the server disconnects a client that sent half a request; None if it does not
    within SILENCE_S.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=SILENCE_S) as client:
        client.sendall(b"POST /model HTT")
        began = time.monotonic()
        try:
            client.recv(1)
        except TimeoutError:
            return None
        return round(time.monotonic() - began, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    size = int(given.gib * (1 << 30))
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in SERVERS}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as there:
        folder = Path(there)
        with (folder / NAME).open("wb") as file:
            file.truncate(size)
        path = f"/files/{Offers().add(folder)}/{NAME}"
        with running(folder) as servers:
            for turn in range(given.repeats):
                for name, (port, pid) in servers.items():
                    figures[name].append(transfer(port, pid, path, size))
                print(f"round {turn + 1} of {given.repeats}", file=sys.stderr)
            ends = {
                name: (status_of_a_negative_length(port), silence_s(port))
                for name, (port, _) in servers.items()
            }
    found = {
        name: {
            "mb_per_s": round(statistics.median(one[0] for one in rows)),
            "cpu_s_per_gib": round(statistics.median(one[1] for one in rows), 2),
            "status_of_content_length_minus_1": ends[name][0],
            "silent_client_ended_after_s": ends[name][1],
        }
        for name, rows in figures.items()
    }
    result = {"what": "one file over loopback, median", "gib": given.gib, "servers": found}
    result |= {"repeats": given.repeats, "cores": os.cpu_count(), "machine": machine()}
    text = json.dumps(result, indent=1)
    if given.out:
        given.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
