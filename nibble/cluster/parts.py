"""vLLM's worker processes on a Ray node: only the node sees the end of one."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from nibble.cluster.member import PART_TITLES, End, Member
from nibble.cluster.node import ranks_by_pid
from nibble.machine.process_table import family
from nibble.machine.processes import first_end
from nibble.serve.failures import part_ended
from nibble.serve.watchdog import Governor


@dataclass(frozen=True)
class Parts:
    """Tells the head which one ended, and its rank; the server knows whether it belongs to
    its run.
    """

    member: Member
    proof: Path

    def watch(self, session: int, governor: Governor, over: threading.Event) -> None:
        """Until `over`. `session` is Ray's."""

        def find() -> dict[int, str]:
            found = [one for one in family(session) if one.name.startswith(PART_TITLES)]
            return {one.pid: str(one.pid) for one in found}

        while not over.is_set():
            if (pid := first_end(find, over)) is None:
                return
            at, ranks = time.monotonic(), ranks_by_pid(self.proof)
            name = (
                f"rank {ranks[int(pid)]} of the model"
                if int(pid) in ranks
                else "a worker process of vLLM's"
            )
            why = part_ended(f"{name} (pid {pid})", "", governor.kernel_has_killed())
            self.member.tell_end(End(0, int(pid), why, at))
