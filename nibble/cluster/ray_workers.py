"""vLLM's worker processes on a Ray node. Only the node itself sees how one of them ends."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from nibble.cluster.member import WORKER_TITLES, End, Member
from nibble.cluster.node import ranks_by_pid
from nibble.machine.process_table import family, own_titles
from nibble.machine.processes import ends
from nibble.serve.failures import part_ended
from nibble.serve.watchdog import Governor


@dataclass(frozen=True)
class RayWorkers:
    """Reports to the head each worker that ends by itself, with its rank.

    The server decides whether the worker belongs to its run. `proof` is the folder of the workers'
    reports.
    """

    member: Member
    proof: Path

    def watch(self, session: int, governor: Governor, over: threading.Event) -> None:
        """Watch the workers of the process session `session` (Ray's) until `over` is set."""

        def workers() -> dict[int, str]:
            processes = family(session)
            named = own_titles(
                processes, lambda one: one.name if one.name.startswith(WORKER_TITLES) else None
            )
            return {pid: str(pid) for pid in named}

        for ended in ends(workers, over):
            at, pid, ranks = time.monotonic(), int(ended), ranks_by_pid(self.proof)
            name = f"rank {ranks[pid]} of the model" if pid in ranks else "a vLLM worker process"
            why = part_ended(f"{name} (pid {pid})", "", governor.kernel_has_killed())
            self.member.tell_end(End(0, pid, why, at))
