"""In a guest with PSI (tests/system/test_memory_in_a_guest.py): the watchdog of a stalled cgroup.

Its limits are such that bytes alone never pause it: only "full avg10" of the cgroup can.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nibble.serve.watchdog import PAUSE_STALLED_PERCENT, STOP_STALLED_PERCENT
from tests.support.system.groups import Group

HIGH_MIB, WANTED_MIB = 100, 320
WATCHDOG = """
from nibble.machine.memory import MemorySource
from nibble.plan.memory import Limits
from nibble.serve.watchdog import Governor

limits = Limits(
    reserve_bytes=1 << 30, stop_below_bytes=0, pause_below_bytes=0, resume_from_bytes=0
)
Governor(MemorySource(), limits, lambda action, why: print(action, why, flush=True)).run()
"""
# Without swap for the cgroup, who takes more than memory.high sleeps for it.
NEIGHBOUR = f"held = bytearray(b'x') * ({WANTED_MIB} << 20)"


@pytest.fixture
def group() -> Group:
    Group.controlled().set("cgroup.subtree_control", "+memory")
    made = Group(Group.controlled().folder / "stalled")
    made.set("memory.high", str(HIGH_MIB << 20))
    made.set("memory.swap.max", "0")
    return made


@pytest.fixture
def watchdog(group: Group) -> Iterator[subprocess.Popen[str]]:
    with started(group, WATCHDOG) as process:
        yield process
        process.kill()


def started(group: Group, program: str) -> subprocess.Popen[str]:
    words = [*group.words, sys.executable, "-c", program]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def test_tasks_that_wait_for_memory_pause_the_server_and_then_stop_it(
    group: Group, watchdog: subprocess.Popen[str]
) -> None:
    assert watchdog.stdout is not None
    time.sleep(5)
    with started(group, NEIGHBOUR) as neighbour:
        said = [watchdog.stdout.readline()]
        while not said[-1].startswith("stop"):
            said.append(watchdog.stdout.readline())
            assert said[-1], said
        assert watchdog.wait(5) == 0  # after a stop there is nothing to watch
        assert neighbour.poll() is None  # and nothing was killed
        neighbour.kill()
    assert said[0].startswith("pause ") and f"(cgroup {group.folder})" in said[0]
    stalled = [re.search(r"all tasks waited for memory (\d+) % of", line) for line in said]
    assert stalled[0] and int(stalled[0][1]) >= PAUSE_STALLED_PERCENT
    assert stalled[-1] and int(stalled[-1][1]) >= STOP_STALLED_PERCENT
    pressure = Path(group.folder / "memory.pressure").read_text()
    assert float(pressure.partition("full avg10=")[2].split()[0]) >= 40, pressure
    assert group.field("memory.events", "oom_kill") == 0
