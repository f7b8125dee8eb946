"""Checks that Ray's head reaches every node, by placing a task on each.

A head that lost a node may use the old connection for minutes after that node is back at the same
address. Requests over that connection are lost, and ray 2.60 counts them as granted: the head
considers the GPU taken until something changes on the node, and vLLM waits for half an hour
(ray-project/ray#63723, #65271). The task takes no GPU and is requested again until it runs. Its
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
TRACE = 0.001  # amount of the resource that Ray names after each node's address
_POLL_S = 0.2


def unreached(
    addresses: Sequence[str], environ: Mapping[str, str], over: threading.Event
) -> str | None:
    """Why Ray's head does not reach all of `addresses`; None if it does, or as soon as `over` is
    set.
    """
    command = [sys.executable, "-P", "-m", "nibble.cluster.ray_reach", str(REACH_S), *addresses]
    child = subprocess.Popen(
        command, env=dict(environ), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while not over.is_set():
        try:
            _, errors = child.communicate(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            continue
        why = (errors.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        return None if child.returncode == 0 else why
    child.kill()
    child.communicate()
    return None


def place(seconds: float, addresses: Sequence[str]) -> None:
    """Place a task on every node. Ends the process with a message if that takes longer than
    `seconds`; the end of the job removes the tasks.
    """
    import ray
    from ray.util.placement_group import placement_group

    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    if not placement_group([{f"node:{address}": TRACE} for address in addresses]).wait(seconds):
        sys.exit(f"Ray's head does not reach all of {', '.join(addresses)} within {seconds:.0f} s")


if __name__ == "__main__":
    die_with_parent(os.getppid())()
    place(float(sys.argv[1]), sys.argv[2:])
