"""docker/quadlet/nibble.container as a service of systemd 257 and Podman 5.4, with the CPU image.

The unit is the shipped one; a drop-in names the demo model. The GPU is a CDI device that sets a
variable. Tests share one machine and follow one another as its life does.
"""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nibble.cli import rollback
from tests.support.paths import ROOT
from tests.support.system.crash_loop import run_into_75
from tests.support.system.machine import Machine
from tests.support.system.podman_machine import SLOW_MODEL, podman_machine

UNIT = "/etc/containers/systemd/nibble.container"
DROP_IN = f"{UNIT}.d/10-test.conf"
KEY = "system-test-key-0123456789"
OLD, NEW = f"gb10-{'1' * 12}", f"gb10-{'2' * 12}"
NIBBLE = "/opt/venv/bin/nibble serve"
CACHE_VOLUME = "/var/lib/containers/storage/volumes/nibble-cache/_data"
START_S = 400


class Service:
    """nibble on the machine: its unit, and its port as this host sees it."""

    def __init__(self, machine: Machine, port: int) -> None:
        self.machine, self.port = machine, port

    def configure(self, *container: str, model: str = "nibble-demo-nvfp4") -> None:
        lines = ("[Container]", f"Environment=MODEL={model}", *container)
        self.machine.write(DROP_IN, "\n".join(lines) + "\n")
        self.machine.run("systemctl", "daemon-reload")

    def start(self) -> None:
        self.machine.run("systemctl", "start", "nibble", timeout=START_S)

    def stop(self) -> None:
        self.machine.run("systemctl", "stop", "nibble", timeout=120)
        self.machine.run("systemctl", "reset-failed", "nibble", check=False)

    def wait_until_ready(self) -> None:
        self.machine.wait_for(lambda: self.state() == "active", START_S, "nibble ready again")

    def state(self) -> str:
        return self.machine.property("nibble", "ActiveState")

    def get(self, path: str, key: str = KEY) -> tuple[int, Any]:
        return self.send(path, None, key)

    def send(self, path: str, payload: Any, key: str = KEY) -> tuple[int, Any]:
        try:
            with self.open(path, payload, key) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, None

    def open(self, path: str, payload: Any, key: str = KEY) -> Any:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        url = f"http://127.0.0.1:{self.port}{path}"
        body = None if payload is None else json.dumps(payload).encode()
        return urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=120)

    def models(self) -> list[str]:
        return [entry["id"] for entry in self.get("/v1/models")[1]["data"]]

    def kill(self, pattern: str, signal: str = "KILL") -> bool:
        """Whether the process with `pattern` in its command line was there."""
        words = ("pkill", f"-{signal}", "--oldest", "--full", pattern)
        return self.machine.ask(*words).returncode == 0


@pytest.fixture(scope="module")
def service(cpu_image: str) -> Iterator[Service]:
    with podman_machine("quadlet") as made:
        for tag, build in ((OLD, "old"), (NEW, "new")):
            created = f"2026-01-0{tag[-1]}T00:00:00Z"
            marks = {"NIBBLE_SERVED_MODEL_NAME": f"{build}-build"}
            made.give(cpu_image, f"localhost/nibble:{tag}", created, **marks)
        made.machine.run("podman", "tag", f"nibble:{OLD}", "nibble:gb10")
        made.machine.run("podman", "secret", "create", "nibble_api_key", "-", stdin=KEY)
        made.machine.write(UNIT, unit())
        service = Service(made.machine, made.port)
        service.configure()
        yield service


def unit() -> str:
    """The shipped one, on an address that reaches out of this machine."""
    text = (ROOT / "docker/quadlet/nibble.container").read_text()
    assert text.count("PublishPort=127.0.0.1:8000:8000") == 1
    return text.replace("PublishPort=127.0.0.1:", "PublishPort=")


@pytest.fixture
def serving(service: Service) -> Service:
    """Ready, however the test before left it."""
    if service.state() != "active":
        service.machine.run("systemctl", "reset-failed", "nibble", check=False)
        service.start()
    return service


def test_started_means_ready_and_the_status_line_is_nibbles(serving: Service) -> None:
    status, answer = serving.send(
        "/v1/completions", {"model": "default", "prompt": "What", "max_tokens": 2}
    )
    assert status == 200 and answer["usage"]["completion_tokens"] == 2
    assert serving.get("/v1/models", key="another")[0] == 401  # the secret is the key
    machine = serving.machine
    text = machine.property("nibble", "StatusText")
    assert re.fullmatch(r"serving old-build at http://127\.0\.0\.1:8000", text)
    limit = "grep 'Max locked memory'"
    device = "tr '\\0' '\\n' < /proc/1/environ | grep ^TEST_CDI_DEVICE"
    asked = f"{device}; id -u; {limit} /proc/self/limits; touch /usr/x || echo no"
    found = machine.run("podman", "exec", "systemd-nibble", "bash", "-c", asked).splitlines()
    conmon = machine.property("nibble", "MainPID")
    allowed = machine.run("sh", "-c", f"{limit} /proc/{conmon}/limits")  # as LimitMEMLOCK= says
    assert found == ["TEST_CDI_DEVICE=nvidia.com/gpu=all", "2000", allowed, "no"]


def test_a_reboot_drains_and_starts_again_and_so_does_a_lost_power_supply(
    serving: Service,
) -> None:
    machine = serving.machine
    since = machine.now()
    machine.reboot()
    serving.wait_until_ready()
    assert sum("drained and stopped" in line for line in machine.journal("nibble", since)) == 1
    assert serving.models()[0] == "old-build"
    machine.lose_power()  # leaves the container's record and files behind
    serving.wait_until_ready()
    assert serving.models()[0] == "old-build"


def test_a_killed_nibble_is_started_again(serving: Service) -> None:
    before = int(serving.machine.property("nibble", "NRestarts"))
    since = serving.machine.now()
    assert serving.kill(NIBBLE)
    serving.machine.wait_for(lambda: serving.state() != "active", 30, "the end was noticed")
    serving.wait_until_ready()
    assert int(serving.machine.property("nibble", "NRestarts")) == before + 1
    assert serving.get("/v1/models")[0] == 200
    ends = [x for x in serving.machine.journal("nibble", since) if "Main process exited" in x]
    assert ends == ["nibble.service: Main process exited, code=exited, status=137/n/a"]


def test_an_upgrade_is_a_tag_and_a_restart_and_so_is_the_way_back(
    serving: Service, tmp_path: Path
) -> None:
    machine = serving.machine
    machine.run("podman", "tag", f"nibble:{NEW}", "nibble:gb10")
    assert serving.models()[0] == "old-build"  # until the restart
    machine.run("systemctl", "restart", "nibble", timeout=START_S)
    assert serving.models()[0] == "new-build"
    podman = tmp_path / "podman"
    podman.write_text(f'#!/bin/sh\nexec {" ".join(machine.words())} podman "$@"\n')
    podman.chmod(0o755)
    rollback.roll_back("gb10", None, False, True, {"DOCKER": str(podman)})
    machine.run("systemctl", "restart", "nibble", timeout=START_S)
    assert serving.models()[0] == "old-build"


def test_a_hung_nibble_is_killed_by_its_liveness_check_and_started_again(
    service: Service,
) -> None:
    service.stop()
    service.configure("HealthInterval=2s", "HealthRetries=2", "HealthStartPeriod=0s")
    service.start()
    assert service.kill(NIBBLE, "STOP")
    service.machine.wait_for(lambda: service.state() != "active", 60, "the hang was noticed")
    service.wait_until_ready()
    assert service.get("/v1/models")[0] == 200
    service.stop()
    service.configure()


def test_stop_lets_a_streaming_answer_finish(service: Service) -> None:
    service.stop()
    quick = ("VLLM_EXTRA_ARGS=--enforce-eager", "NIBBLE_REFERENCE=off", "NIBBLE_CANARY=off")
    lines = [f"Environment={setting}" for setting in quick]
    service.configure(f"Volume={SLOW_MODEL}:{SLOW_MODEL}:ro", *lines, model=SLOW_MODEL)
    service.start()
    payload = {"model": "default", "prompt": "hello", "max_tokens": 200, "ignore_eos": True}
    chunks: list[dict[str, Any]] = []
    late: list[int] = []
    stopped_at = 0.0
    stopper = threading.Thread(target=service.machine.run, args=("systemctl", "stop", "nibble"))
    with service.open("/v1/completions", payload | {"stream": True}) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunks.append(json.loads(line[6:]))
            if len(chunks) == 20:
                stopper.start()
                stopped_at = time.monotonic()
            if not late and len(chunks) > 20 and time.monotonic() - stopped_at > 1.5:
                late.append(service.send("/v1/completions", payload | {"max_tokens": 1})[0])
    stopper.join(90)
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert [reason for reason in reasons if reason] == ["length"] and late == [503]
    assert service.state() == "inactive"
    assert service.machine.property("nibble", "Result") == "success"
    assert service.machine.journal("nibble")[-1].startswith("nibble.service: Consumed")
    service.configure()


def test_a_setting_to_correct_ends_with_one_line_and_no_restart(service: Service) -> None:
    service.stop()
    service.configure("Environment=MAX_NUM_SEQS=abc")
    since = service.machine.now()
    failed = service.machine.ask("systemctl", "start", "nibble")
    assert failed.returncode == 1  # the user sees it at once
    time.sleep(12)  # RestartSec= and more
    assert service.state() == "failed"
    assert service.machine.property("nibble", "ExecMainStatus") == "2"
    words = ("--grep", "nibble: error", "--output", "cat", "--since", since)
    assert service.machine.run("journalctl", "--unit", "nibble", *words) == (
        "nibble: error: MAX_NUM_SEQS is 'abc'; expected a whole number from 1 to 65536; "
        "correct or unset MAX_NUM_SEQS"
    )
    service.configure()
    service.stop()


def test_a_crash_loop_ends_with_75_and_stays_down(service: Service) -> None:
    service.stop()
    (line,) = run_into_75(service.machine, CACHE_VOLUME)
    assert line.startswith("nibble: error: 6 starts in a row failed, the last with: vLLM ended")
    service.stop()


def test_the_generator_accepts_the_shipped_unit_and_refuses_an_unknown_key(
    service: Service,
) -> None:
    machine = service.machine
    shipped = (ROOT / "docker/quadlet/nibble.container").read_text()
    for text, code in ((shipped, 0), (shipped.replace("[Container]", "[Container]\nNoKey=1"), 1)):
        machine.write("/run/check/nibble.container", text)
        words = ("env", "QUADLET_UNIT_DIRS=/run/check", "/usr/libexec/podman/quadlet", "-dryrun")
        assert machine.ask(*words).returncode == code
