"""Nodes of a cluster: containers of the CPU image with addresses on a private network."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.docker.containers import Container, docker, running
from tests.support.docker.containers import client as docker_client
from tests.support.paths import CLUSTER_PLATFORM

TOKEN = secrets.token_hex(32)
SUBNET = "10.89.7"
START_S = 600.0  # 60 s on two free cores; 400 s on two that ten other processes use, too
NAMED_S = 30.0  # the longest time until a lost node is named and its requests have ended
DEMO = "/opt/nibble/models/nibble-demo"
PROMPTS = ("What is NVFP4?", "The demo model", "word7 word11")
# Small enough for several nodes on two cores; no memory is kept back, for the machine is shared
# with the other nodes.
SMALL = {
    "NIBBLE_KV_CACHE_BYTES": str(64 << 20),
    "NIBBLE_MEMORY_RESERVE_GIB": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Ranks that wait for one another in busy loops would take each other's cores
    "OMP_NUM_THREADS": "1",
    "NIBBLE_ALLOW_ANONYMOUS": "1",
    "NIBBLE_CLUSTER_WAIT_SECONDS": "120",
    "PYTHONPATH": "/plugin",
}


@contextlib.contextmanager
def network() -> Iterator[str]:
    """A private network without a way out."""
    name = f"nibble-cluster-{secrets.token_hex(4)}"
    docker("network", "create", "--internal", "--subnet", f"{SUBNET}.0/24", name)
    try:
        yield name
    finally:
        docker("network", "rm", name, check=False)


@dataclass
class Node:
    """A container with a fixed address on the network."""

    container: Container
    address: str
    network: str

    def docker(self, verb: str, *words: str) -> None:
        docker(verb, *words, self.container.id)

    def pause(self) -> None:
        """Again where the kernel cannot freeze a busy process at once (runc with cgroup v1:
        "unable to freeze").
        """
        for _ in range(10):
            if docker("pause", self.container.id, check=False).returncode == 0:
                return
            time.sleep(0.5)
        docker("pause", self.container.id)

    def cut(self) -> None:
        docker("network", "disconnect", "--force", self.network, self.container.id)

    def join(self) -> None:
        docker("network", "connect", "--ip", self.address, self.network, self.container.id)

    def python(self, code: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """A program in the container; it need not be able to reach anything."""
        options = [word for name, value in environ.items() for word in ("--env", f"{name}={value}")]
        return self.container.exec("python", "-c", code, *words, options=options)

    def ask(
        self, address: str, path: str, body: Any = None, timeout_s: float = 60
    ) -> tuple[int, Any]:
        """(status, JSON) of a request from this container; (0, None) without an answer in time."""
        done = self.python(ASK, f"http://{address}{path}", json.dumps(body), str(timeout_s))
        return tuple(json.loads(done.stdout)) if done.returncode == 0 and done.stdout else (0, None)

    def status(self) -> dict[str, Any]:
        return self.ask("127.0.0.1:8001", "/status", timeout_s=5)[1] or {}

    def is_ready(self) -> bool:
        return self.ask("127.0.0.1:8001", "/ready", timeout_s=5)[0] == 200

    def logs(self) -> str:
        return self.container.logs()

    def wait_for(self, what: Callable[[], Any], seconds: float, says: str) -> float:
        """Until `what()`, the seconds it took."""
        began = time.monotonic()
        while not what():
            assert time.monotonic() - began < seconds, (
                f"not {says} after {seconds:.0f} s\n{self.logs()[-6000:]}"
            )
            time.sleep(0.5)
        return time.monotonic() - began

    def wait_ready(self, seconds: float = START_S) -> float:
        def look() -> bool:
            assert not self.has_ended(), f"it ended before it was ready\n{self.logs()[-6000:]}"
            return self.is_ready()

        return self.wait_for(look, seconds, "ready")

    def has_ended(self) -> bool:
        """Whether its container stopped and its restart policy will not start it again."""
        return self.container.inspect()["State"]["Status"] in ("exited", "dead")

    def processes(self, *titles: str) -> list[str]:
        """Processes in the container with one of `titles` in their command line; none where it
        has ended.
        """
        state = self.container.inspect()["State"]
        if not state["Running"] or state["Restarting"]:
            return []
        listed = docker("top", self.container.id, "-eo", "pid,args").stdout.splitlines()
        return [line for line in listed if any(title in line for title in titles)]

    def leftovers(self) -> list[str]:
        """vLLM's and Ray's processes."""
        return self.processes("VLLM::", "ray::", "raylet", "vllm.entry")

    def parts(self) -> list[str]:
        """Processes that hold parts of a model."""
        return self.processes("VLLM::Worker", "ray::RayWorkerP")


ASK = """
import json, sys, urllib.error, urllib.request
url, body, timeout = sys.argv[1:]
data = None if body == "null" else body.encode()
request = urllib.request.Request(url, data, {"content-type": "application/json"})
try:
    with urllib.request.urlopen(request, timeout=float(timeout)) as answer:
        print(json.dumps([answer.status, json.load(answer)]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, None]))
"""


@contextlib.contextmanager
def node(
    image: str, net: str, number: int, *words: str, options: Sequence[str] = (), **environ: str
) -> Iterator[Node]:
    """A hardened node at SUBNET.number that runs `words`, with this folder's test-only platform
    plugin.
    """
    address = f"{SUBNET}.{number}"
    values = SMALL | {"NIBBLE_CLUSTER_TOKEN": TOKEN} | environ
    given = [
        word for name, value in values.items() if value for word in ("--env", f"{name}={value}")
    ]
    place = [
        "--network",
        net,
        "--ip",
        address,
        "--hostname",
        f"node{number}",
        "--volume",
        f"{CLUSTER_PLATFORM}:/plugin:ro",
    ]
    hard = [
        "--read-only",
        "--tmpfs",
        "/tmp:exec,size=1g",
        "--shm-size",
        "1g",
        "--tmpfs",
        "/var/cache/nibble:exec,mode=0777",
    ]
    rights = ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    with running(image, *words, options=[*place, *hard, *rights, *given, *options]) as container:
        yield Node(container, address, net)


class Serve:
    """`nibble serve` through Ray in the head's container."""

    def __init__(self, head: Node, log: Path, model: str, **environ: str) -> None:
        self.head, self.log = head, log
        values = {"NIBBLE_CLUSTER": "ray", "NUM_GPUS": "", **environ}
        options = [word for name, value in values.items() for word in ("--env", f"{name}={value}")]
        words = ["exec", *options, head.container.id, "/opt/nibble/entrypoint.sh", "serve", model]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [docker_client() or "docker", *words, "--max-model-len", "1024"],
                stdout=out,
                stderr=out,
            )

    def said(self, words: str) -> bool:
        return words in self.log.read_text()

    def wait_for(self, what: Callable[[], Any], seconds: float, says: str) -> None:
        """Until `what()`; AssertionError with its log where it ends or the time is over."""
        deadline = time.monotonic() + seconds
        while not what():
            assert self.process.poll() is None, f"it ended\n{self.log.read_text()[-6000:]}"
            assert time.monotonic() < deadline, (
                f"not {says} after {seconds:.0f} s\n{self.log.read_text()[-6000:]}"
            )
            time.sleep(0.5)

    def wait_ready(self, seconds: float = START_S) -> None:
        self.wait_for(self.head.is_ready, seconds, "ready")


STREAM = """
import sys, urllib.request
url, kind = f"http://{sys.argv[1]}:8000/v1/completions", {"content-type": "application/json"}
request = urllib.request.Request(url, sys.argv[2].encode(), kind)
for line in urllib.request.urlopen(request, timeout=200):
    print(line.decode(), end="", flush=True)
"""


class Stream:
    """A streaming completion of many tokens that `client` asks `server` for; it runs once this
    is made.
    """

    def __init__(self, client: Node, server: Node, max_tokens: int = 900) -> None:
        body = {
            "model": "default",
            "prompt": "What is NVFP4?",
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
        words = [STREAM, server.address, json.dumps(body | {"stream": True})]
        self.process = subprocess.Popen(
            [docker_client() or "docker", "exec", client.container.id, "python", "-c", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline()

    def must_end_in_error(self, seconds: float) -> None:
        """Wait for its end; an error is what the client raises, what an event says, or a last
        event that is missing.
        """
        text, _ = self.process.communicate(timeout=seconds)
        assert self.process.returncode != 0 or '"error"' in text or "[DONE]" not in text

    def must_end_whole(self, seconds: float) -> None:
        text, _ = self.process.communicate(timeout=seconds)
        assert self.process.returncode == 0 and '"error"' not in text and "[DONE]" in text


POLL = """
import json, sys, threading, time, urllib.request
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
asked, refused, states = 0, 0, []
while not over.is_set():
    asked += 1
    try:
        with urllib.request.urlopen("http://127.0.0.1:8001/status", timeout=5) as answer:
            states.append(json.load(answer)["state"])
    except OSError:
        refused += 1
    time.sleep(0.05)
print(json.dumps([asked, refused, list(dict.fromkeys(states))]))
"""


class ControlPort:
    """Asks a node's control port for /status 20 times a second, in its container; `refused` was
    not answered.
    """

    asked = refused = 0
    states: Sequence[str] = ()

    def __init__(self, server: Node) -> None:
        words = ["exec", "--interactive", server.container.id, "python", "-c", POLL]
        self._process = subprocess.Popen(
            [docker_client() or "docker", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> ControlPort:
        return self

    def __exit__(self, *raised: object) -> None:
        text, _ = self._process.communicate(timeout=30)
        self.asked, self.refused, self.states = json.loads(text)


def greedy(client: Node, server: Node) -> list[str]:
    """Greedy answers that `client` gets from `server`."""
    found = []
    for prompt in PROMPTS:
        body = {
            "model": "default",
            "prompt": prompt,
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
        }
        status, answer = client.ask(f"{server.address}:8000", "/v1/completions", body)
        assert status == 200
        found.append(answer["choices"][0]["text"])
    return found
