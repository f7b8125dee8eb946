"""One server on a port from its first second on: vLLM takes the port later and would admit a
second.

The lock is a name in Linux's abstract socket namespace. It belongs to the network namespace, as the
port does: containers do not disturb each other, every user on the host sees it, no file stays
behind, and the kernel releases it with the process. A bound TCP socket is not enough: vLLM binds
with SO_REUSEADDR, which lets two sockets that do not listen share a port.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from nibble.errors import ExitCode, NibbleError

_PREFIX = "nibble-port"
_TURN_S = 2.0
_TABLE = Path("/proc/net/unix")


@contextlib.contextmanager
def hold_port(host: str, port: int) -> Iterator[None]:
    """Hold `host`:`port` among nibble's servers. Raises CONFIG for one that is held or overlaps."""
    addresses = _addresses(host)
    with contextlib.ExitStack() as held:
        with _one_at_a_time(port):
            for address in addresses:
                held.enter_context(_take(host, port, address))
            others = [one for one in _held(port) if one not in addresses]
            if any(overlap(one, other) for one in addresses for other in others):
                raise _in_use(host, port)
        yield


@contextlib.contextmanager
def _one_at_a_time(port: int) -> Iterator[None]:
    """Serialize servers that take overlapping addresses at the same moment, so that one of them
    gets them.
    """
    deadline = time.monotonic() + _TURN_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as turn:
        while time.monotonic() < deadline:
            try:
                turn.bind(f"\0{_PREFIX}-turn-{port}")
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                time.sleep(0.005)
        yield


def _take(host: str, port: int, address: str) -> socket.socket:
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        lock.bind(f"\0{_PREFIX}-{port}-{address}")
    except OSError as error:
        lock.close()
        if error.errno == errno.EADDRINUSE:
            raise _in_use(host, port) from None
        raise
    return lock


def _addresses(host: str) -> list[str]:
    """Each address that the server will listen on, in one notation. A later check refuses an
    unknown name.
    """
    name = host.strip().removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(
            name or None, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError):
        return []
    return sorted(
        {str(ipaddress.ip_address(str(entry[4][0]).partition("%")[0])) for entry in found}
    )


def _held(port: int) -> list[str]:
    """Addresses with that port that nibble's servers hold; empty where the kernel does not list
    them.
    """
    prefix = f"@{_PREFIX}-{port}-"
    try:
        names = [
            line.split()[-1] for line in _TABLE.read_text(errors="replace").splitlines()[1:] if line
        ]
    except OSError:
        return []
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def is_held(port: int) -> bool:
    """Whether a server of nibble has the port, on any address."""
    return bool(_held(port))


def overlap(one: str, other: str) -> bool:
    """Whether two addresses cannot have the same port: they are equal, or one means all. `::`
    includes IPv4.
    """
    first, second = ipaddress.ip_address(one), ipaddress.ip_address(other)
    if first == second or str(first) == "::" or str(second) == "::":
        return True
    return first.version == second.version and (first.is_unspecified or second.is_unspecified)


def _in_use(host: str, port: int) -> NibbleError:
    what = f"PORT {port} is in use on {host}: another nibble starts or serves there"
    return NibbleError(
        ExitCode.CONFIG,
        what=what,
        action="stop it with `nibble stop` (Ctrl-C in the foreground) or set another PORT",
    )
