"""The threads of a process that the kernel really restricts: by affinity, and by a quota of its
cgroup.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAM = "from nibble.machine.cpus import compute_cores as c; print(c().threads, c().reason)"
CGROUPS = Path("/sys/fs/cgroup")


def threads_and_reason(before: Callable[[], object]) -> tuple[int, str]:
    """What a new process finds that calls `before` first."""
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, capture_output=True, text=True, check=True, preexec_fn=before)
    count, _, reason = done.stdout.strip().partition(" ")
    return int(count), reason


def test_a_process_on_one_cpu_has_one_thread() -> None:
    cpu = min(os.sched_getaffinity(0))
    found = threads_and_reason(lambda: os.sched_setaffinity(0, {cpu}))
    assert found == (1, "1 physical core")


@contextlib.contextmanager
def cgroup_with_quota(microseconds: int) -> Iterator[Path]:
    """The file that takes a process into a cgroup with this quota of 100 ms."""
    v2 = (CGROUPS / "cgroup.controllers").exists()
    folder = (CGROUPS if v2 else CGROUPS / "cpu") / f"nibble-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        try:
            if v2:
                (folder / "cpu.max").write_text(f"{microseconds} 100000")
            else:
                (folder / "cpu.cfs_quota_us").write_text(str(microseconds))
        except OSError as error:
            pytest.skip(f"no quota can be set here: {error}")
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


@pytest.mark.parametrize(("microseconds", "threads"), [(150_000, 2), (100_000, 1), (40_000, 1)])
def test_a_quota_of_the_kernel_limits_the_threads(microseconds: int, threads: int) -> None:
    """As `docker run --cpus 1.5` and fewer."""
    cores, _ = threads_and_reason(lambda: None)
    with cgroup_with_quota(microseconds) as members:
        found = threads_and_reason(lambda: members.write_text(str(os.getpid())))
    assert found[0] == min(threads, cores)
    if microseconds < 100_000 * cores:
        assert f"quota gives {microseconds / 100_000:g}" in found[1]
