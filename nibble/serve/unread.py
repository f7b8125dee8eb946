"""Finds clients that do not read their answers, by the send queues of the API's port in
/proc/net/tcp.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_OPEN = ("01", "04", "08")  # established, FIN_WAIT1, CLOSE_WAIT (include/net/tcp_states.h)
_SHOWN = 3
STUCK_S = 2.0  # an acknowledgement may be on its way, from a client far away


@dataclass(frozen=True, slots=True)
class Queue:
    """One connection: the client's address, and the bytes that its machine has not accepted."""

    client: str
    waiting_bytes: int


class Unread:
    """Follows the send queues of a port. Call `look` often; `clients` names the clients that read
    nothing.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._since: dict[
            str, tuple[int, float]
        ] = {}  # client -> bytes, and since when it is as many

    def look(self, now_s: float, queues: Iterable[Queue] | None = None) -> None:
        """Read the queues as they are now."""
        before = self._since
        self._since = {}
        for queue in send_queues(self._port) if queues is None else queues:
            was, since_s = before.get(queue.client, (0, now_s))
            since_s = since_s if was == queue.waiting_bytes else now_s
            self._since[queue.client] = queue.waiting_bytes, since_s

    def clients(self, now_s: float) -> str:
        """`127.0.0.1:5000 (for 12 s, 2500000 bytes wait)`, the longest first; empty if all clients
        read.
        """
        stuck = [one for one in self._since.items() if now_s - one[1][1] >= STUCK_S]
        found = sorted(stuck, key=lambda one: one[1][1])
        shown = [
            f"{name} (for {now_s - since:.0f} s, {size} bytes wait)"
            for name, (size, since) in found
        ]
        more = f" and {len(shown) - _SHOWN} more" if shown[_SHOWN:] else ""
        return ", ".join(shown[:_SHOWN]) + more


def send_queues(port: int) -> list[Queue]:
    """Connections to the local `port` with unacknowledged bytes; empty where the kernel does not
    list them.
    """
    found = []
    for table in _TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        found += [queue for line in lines if (queue := parse(line, port))]
    return found


def parse(line: str, port: int) -> Queue | None:
    """One line of proc(5)'s /proc/net/tcp, if it is an open connection to `port` with a queue."""
    fields = line.split()
    if len(fields) < 5 or int(fields[1].rpartition(":")[2], 16) != port or fields[3] not in _OPEN:
        return None
    waiting = int(fields[4].partition(":")[0], 16)
    return Queue(_address(fields[2]), waiting) if waiting else None


def _address(text: str) -> str:
    """`0100007F:1F90` as `127.0.0.1:8080`: words of 32 bits in the machine's byte order."""
    packed, _, port = text.partition(":")
    words = [int(packed[at : at + 8], 16) for at in range(0, len(packed), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = getattr(address, "ipv4_mapped", None)
    host = f"[{address}]" if address.version == 6 and mapped is None else str(mapped or address)
    return f"{host}:{int(port, 16)}"
