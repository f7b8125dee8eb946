"""The command that docs/cluster.md gives for a Ray head's container, run with stand-ins for head
and server.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nibble.machine.paths import root

# `serve` fails once, then serves; a head that is told to stop drains for a second.
NIBBLE = r"""#!/bin/bash
case $1 in
  ray-head)
    trap 'echo drains; sleep 0.5; echo ends; exit 0' TERM
    for _ in $(seq ${HEAD_TENTHS:-300}); do sleep 0.1; done
    exit 10 ;;
  serve)
    echo serve >> "$STARTS"
    [ $(wc -l < "$STARTS") -gt 1 ] || exit ${FIRST:-10}
    sleep 30 ;;
esac
"""


@contextlib.contextmanager
def started(folder: Path, **environ: str) -> Iterator[subprocess.Popen[str]]:
    program = folder / "nibble"
    program.write_text(NIBBLE)
    program.chmod(0o755)
    text = (root() / "docs" / "cluster.md").read_text()
    found = re.search(r"^    bash -c '\n(.*?)'\n", text, re.MULTILINE | re.DOTALL)
    assert found
    script = found[1].replace("sleep 5", "sleep 0.2")
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "STARTS": str(folder / "starts"), **environ}
    command = ["bash", "-c", script]
    running = subprocess.Popen(
        command, env=own, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)


def starts(folder: Path) -> int:
    path = folder / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_the_server_is_started_again_and_a_stop_lets_the_head_end_in_order(tmp_path: Path) -> None:
    with started(tmp_path) as running:
        deadline = time.monotonic() + 20
        while starts(tmp_path) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0
        assert running.stdout is not None
        assert os.read(running.stdout.fileno(), 100).decode() == "drains\nends\n"


@pytest.mark.parametrize("code", ["0", "2", "75"])
def test_a_server_that_a_restart_cannot_help_stays_down_and_the_head_runs_on(
    tmp_path: Path, code: str
) -> None:
    with started(tmp_path, FIRST=code, HEAD_TENTHS="20") as running:
        assert running.wait(30) == 10  # the head's own end is the container's
        assert starts(tmp_path) == 1
