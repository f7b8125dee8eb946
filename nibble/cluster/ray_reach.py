"""Checks that Ray's head reaches every node, by placing a task on each.

A head that lost sight of a node may talk into the old connection for minutes after that node is
back at the same address. What it asks there meanwhile is lost, and ray 2.60 counts it as given: the
head counts the GPU as taken until something changes on the node, and vLLM waits for half an hour
(ray-project/ray#63723, #65271). The task takes no GPU, is requested again until it runs, and its
change on the node corrects the head's count.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from nibble.machine.processes import die_with_parent

REACH_S = 60.0
TRACE = 0.001  # of the resource that every Ray node has under its address
_LOOK_S = 0.2


def unreached(
    addresses: Sequence[str], environ: Mapping[str, str], over: threading.Event
) -> str | None:
    """Why Ray's head does not reach all of `addresses`, or None; None too as soon as `over` is
    set.
    """
    command = [sys.executable, "-P", "-m", "nibble.cluster.ray_reach", str(REACH_S), *addresses]
    child = subprocess.Popen(
        command, env=dict(environ), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while not over.is_set():
        try:
            _, said = child.communicate(timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            continue
        last = (said.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        return None if child.returncode == 0 else last
    child.kill()
    child.communicate()
    return None


def place(seconds: float, addresses: Sequence[str]) -> None:
    """Ends the process with a line where a trace is not everywhere within `seconds`. The job's
    end takes them away.
    """
    import ray
    from ray.util.placement_group import placement_group

    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    if not placement_group([{f"node:{address}": TRACE} for address in addresses]).wait(seconds):
        sys.exit(f"Ray's head does not reach all of {', '.join(addresses)} within {seconds:.0f} s")


if __name__ == "__main__":
    die_with_parent(os.getppid())()
    place(float(sys.argv[1]), sys.argv[2:])
