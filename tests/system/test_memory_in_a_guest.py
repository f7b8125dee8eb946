"""Memory pressure on cgroup v2 with swap, in a guest with another kernel (User-mode Linux)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.system import guest
from tests.support.system.kernel import built_kernel

IN_GUEST = "tests/system/in_guest"


def pytest_words(file: str, *options: str) -> list[str]:
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--system", "-q"]
    return [*words, f"{IN_GUEST}/{file}", *options]


@pytest.mark.vllm
@pytest.mark.parametrize("limit", ["memory.max", "memory.high", "machine"])
def test_the_watchdog_acts_before_the_guest_swaps_and_only_our_server_ends(
    limit: str, tmp_path: Path
) -> None:
    words = pytest_words("memory_pressure.py", "-k", f"[{limit}]" if limit else "")
    with guest.many_maps():
        ended = guest.run_in_guest(
            guest.debian_kernel(), tmp_path / "guest", words, memory_mib=4096, swap_mib=1024
        )
    assert ended.code == 0 and "1 passed" in ended.output, ended.output


def test_the_watchdog_acts_on_the_stalls_of_its_cgroup(tmp_path: Path) -> None:
    ended = guest.run_in_guest(
        built_kernel(),
        tmp_path / "guest",
        pytest_words("memory_stalls.py"),
        memory_mib=1024,
        swap_mib=512,
        seconds=200,
    )
    assert ended.code == 0 and "1 passed" in ended.output, ended.output
