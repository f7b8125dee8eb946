"""A service whose vLLM is killed at each start, to the end of its crash loop."""

from __future__ import annotations

import json
import time

from tests.support.system.machine import Machine

# nibble waits 60, 300 and 900 s after the third to fifth failure: 3 s of the last are left.
AGES_S = (1140, 1080, 1020, 960, 897)


def run_into_75(machine: Machine, cache: str) -> list[str]:
    """nibble's lines about the loop's end. `cache` is the folder of nibble's cache.

    Failures two to five are written into the record: nibble would wait 21 minutes for them.
    """
    folder = f"{cache}/crash-loop"
    machine.run("rm", "-rf", folder)  # of the tests before
    since = machine.now()
    machine.run("systemctl", "start", "--no-block", "nibble")
    _kill_the_api_server(machine)
    machine.wait_for(lambda: _code(machine) == "10", 60, "the first failure")
    path = f"{folder}/{machine.run('ls', folder)}"
    (failure,) = json.loads(machine.run("cat", path))["failures"]
    times = [{**failure, "at_s": time.time() - age} for age in AGES_S]
    machine.write(path, json.dumps({"model": "nibble-demo-nvfp4", "failures": times}))
    _kill_the_api_server(machine)  # of the start that systemd makes by itself
    machine.wait_for(
        lambda: machine.property("nibble", "ActiveState") == "failed", 90, "the crash loop's end"
    )
    restarts = machine.property("nibble", "NRestarts")
    time.sleep(12)  # RestartSec= and more
    assert (machine.property("nibble", "ActiveState"), _code(machine)) == ("failed", "75")
    assert machine.property("nibble", "NRestarts") == restarts
    machine.run("rm", path)
    words = ("--grep", "nibble: error: .* starts in a row failed", "--output", "cat")
    return machine.run("journalctl", "-u", "nibble", *words, "--since", since).splitlines()


def _code(machine: Machine) -> str:
    return machine.property("nibble", "ExecMainStatus")


def _kill_the_api_server(machine: Machine) -> None:
    words = ("pkill", "-KILL", "--oldest", "--full", "nibble.engine.start_vllm")
    machine.wait_for(lambda: machine.ask(*words).returncode == 0, 90, "vLLM's API server")
