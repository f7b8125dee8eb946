"""docker/systemd/nibble.service on Debian 12's systemd, with vLLM and nibble of the CPU image.

The machine has them where the unit looks: /opt/nibble and its .venv. Tests follow one another.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT
from tests.support.system.crash_loop import run_into_75
from tests.support.system.machine import Machine, booted, machine_image

UNIT = "/etc/systemd/system/nibble.service"
SETUP = (
    "apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q install -y "
    "--no-install-recommends systemd systemd-sysv dbus procps curl && "
    "ln -s /opt/venv /opt/nibble/.venv"
)
NIBBLE = "nibble serve"
START_S = 400
CACHE = "/var/cache/nibble/home/.cache/nibble"


def configure(machine: Machine, **settings: str) -> None:
    base = {"MODEL": "nibble-demo-nvfp4", "NIBBLE_ROOT": "/opt/nibble"}
    lines = [f"{key}={value}" for key, value in (base | settings).items()]
    machine.write("/etc/nibble.env", "\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def machine(cpu_image: str) -> Iterator[Machine]:
    image = machine_image("nibble-test-machine:systemd", cpu_image, SETUP)
    with booted(image, "systemd") as made:
        made.write(UNIT, (ROOT / "docker/systemd/nibble.service").read_text())
        configure(made)
        made.run("systemctl", "daemon-reload")
        made.run("systemctl", "enable", "nibble")
        yield made


def state(machine: Machine) -> str:
    return machine.property("nibble", "ActiveState")


def stop(machine: Machine) -> None:
    machine.run("systemctl", "stop", "nibble", timeout=120)
    machine.run("systemctl", "reset-failed", "nibble", check=False)


def wait_until_ready(machine: Machine) -> None:
    machine.wait_for(lambda: state(machine) == "active", START_S, "nibble ready")
    url = "http://127.0.0.1:8000/v1/models"
    assert "nibble-demo-nvfp4" in machine.run("curl", "-fsS", url)


@pytest.fixture
def serving(machine: Machine) -> Machine:
    if state(machine) != "active":
        machine.run("systemctl", "reset-failed", "nibble", check=False)
        machine.run("systemctl", "start", "nibble", timeout=START_S)
    return machine


def test_systemd_finds_nothing_to_correct_in_the_unit(machine: Machine) -> None:
    found = machine.ask("systemd-analyze", "verify", UNIT)
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_started_means_ready_and_a_boot_starts_it(serving: Machine) -> None:
    wait_until_ready(serving)
    assert re.fullmatch(r"serving \S+ at http://127\.0\.0\.1:8000", status_text(serving))
    since = serving.now()
    serving.reboot()
    wait_until_ready(serving)
    assert sum("drained and stopped" in line for line in serving.journal("nibble", since)) == 1


def status_text(machine: Machine) -> str:
    return machine.property("nibble", "StatusText")


def test_a_killed_nibble_leaves_nothing_behind_and_is_started_again(serving: Machine) -> None:
    engine = serving.run("pgrep", "--full", "VLLM::EngineCore").split()
    before = int(serving.property("nibble", "NRestarts"))
    serving.run("pkill", "-KILL", "--oldest", "--full", NIBBLE)
    serving.wait_for(lambda: state(serving) != "active", 30, "the end was noticed")
    wait_until_ready(serving)
    assert int(serving.property("nibble", "NRestarts")) == before + 1
    now = serving.run("pgrep", "--full", "VLLM::EngineCore").split()
    assert len(now) == len(engine) and not set(now) & set(engine)


def test_a_stopped_supervisor_misses_the_watchdog_and_is_started_again(
    serving: Machine,
) -> None:
    before = int(serving.property("nibble", "NRestarts"))
    since = serving.now()
    serving.run("pkill", "-STOP", "--oldest", "--full", NIBBLE)
    serving.wait_for(lambda: state(serving) != "active", 90, "the watchdog")
    wait_until_ready(serving)
    assert int(serving.property("nibble", "NRestarts")) == before + 1
    assert any("Watchdog timeout" in line for line in serving.journal("nibble", since))


def test_a_setting_to_correct_ends_with_one_line_and_no_restart(machine: Machine) -> None:
    stop(machine)
    configure(machine, MAX_NUM_SEQS="abc")
    since = machine.now()
    assert machine.ask("systemctl", "start", "nibble").returncode == 1
    time.sleep(12)  # RestartSec= and more
    assert state(machine) == "failed"
    assert machine.property("nibble", "ExecMainStatus") == "2"
    lines = [line for line in machine.journal("nibble", since) if "error" in line]
    assert len(lines) == 1 and lines[0].startswith("nibble: error: MAX_NUM_SEQS is 'abc'; expected")
    configure(machine)


def test_a_crash_loop_ends_with_75_and_stays_down(machine: Machine) -> None:
    stop(machine)
    (line,) = run_into_75(machine, CACHE)
    assert line.startswith("nibble: error: 6 starts in a row failed, the last with: vLLM ended")
