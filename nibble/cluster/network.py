"""This node's address, the interface that has it, and the interface's RDMA devices."""

from __future__ import annotations

import contextlib
import fcntl
import queue
import re
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nibble.errors import ExitCode, NibbleError
from nibble.settings.options import Settings

_SIOCGIFADDR = 0x8915  # linux/sockios.h
RESOLVE_S = 2.0
_OUTSIDE = "192.0.2.1"  # RFC 5737: stands for any address beyond this machine
_SYS = Path("/sys")


@dataclass(frozen=True)
class RdmaDevice:
    """One RDMA port that is up. `gid_index` is that of RoCE v2 with the node's IPv4 address,
    None where there is none.
    """

    name: str
    port: int
    link: str
    interface: str
    gid_index: int | None


def node_address(settings: Settings, head: str | None) -> str:
    """Where the other nodes reach this one:

    WORKER_IP, on the head (`head` None) HEAD_IP, else the address of NIBBLE_CLUSTER_INTERFACE, else
    that of the route to the head. Raises CLUSTER for an unknown name.
    """
    if settings.worker_ip:
        return resolve(settings.worker_ip, "WORKER_IP")
    if head is None and settings.head_ip:
        return resolve(settings.head_ip, "HEAD_IP")
    if settings.cluster_interface and (found := address_of(settings.cluster_interface)):
        return found
    target = resolve(head, "HEAD_IP") if head else _OUTSIDE
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing
            return probe.getsockname()[0]
    except OSError as error:
        name = "HEAD_IP" if head is None else "WORKER_IP"
        what = f"nibble cannot find this node's address ({error.strerror or error})"
        raise NibbleError(
            ExitCode.CLUSTER,
            what=what,
            expected="a network route",
            action=f"set {name} to this node's address",
        ) from None


def resolve(name: str, variable: str) -> str:
    """The IPv4 address of `name`. Raises CLUSTER for a name that is not known, and for name servers
    that are silent.

    The C library alone would ask silent ones for 10 s and more, and takes no limit from its caller.
    """
    found: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found.put(socket.gethostbyname(name))
        except (
            OSError,
            UnicodeError,
        ) as error:  # a name with an empty part cannot even be asked for
            found.put(error)

    threading.Thread(target=ask, name="resolve", daemon=True).start()
    try:
        answer = found.get(timeout=RESOLVE_S)
    except queue.Empty:
        answer = OSError(0, f"no name server answers within {RESOLVE_S:.0f} s")
    if isinstance(answer, str):
        return answer
    why = getattr(answer, "strerror", None) or answer
    what = f"{variable} {name} is neither an IPv4 address nor a known name ({why})"
    raise NibbleError(
        ExitCode.CLUSTER, what=what, expected="a node's address", action=f"correct {variable}"
    ) from None


def is_here(address: str) -> bool:
    """Whether `address` (or the name of one) is this machine's."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0], socket.SOCK_STREAM) as probe:
            probe.bind(found[4])
    except (OSError, UnicodeError):
        return False
    return True


def interface_of(address: str) -> str | None:
    """The network interface that has `address` (IPv4), or None."""
    found = next((name for _, name in socket.if_nameindex() if address_of(name) == address), None)
    return found or ("lo" if address.startswith("127.") else None)


def address_of(interface: str) -> str | None:
    """Its first IPv4 address; None where it has none, or is not here."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def mtu(interface: str) -> int | None:
    """Bytes of the largest packet, or None where the kernel does not say."""
    with contextlib.suppress(OSError, ValueError):
        return int((_SYS / "class/net" / interface / "mtu").read_text())
    return None


def rdma_devices(address: str, sys: Path = _SYS) -> tuple[RdmaDevice, ...]:
    """RDMA ports that are up, those of RoCE with the GID of `address` (its index differs from
    node to node).
    """
    found: list[RdmaDevice] = []
    for port in sorted(sys.glob("class/infiniband/*/ports/*")):
        state, link = _read(port / "state"), _read(port / "link_layer")
        if "ACTIVE" not in state:
            continue
        interface = _read(port / "gid_attrs/ndevs/0")
        found.append(
            RdmaDevice(
                port.parent.parent.name, int(port.name), link, interface, _gid_index(port, address)
            )
        )
    return tuple(found)


def _gid_index(port: Path, address: str) -> int | None:
    """RoCE v2 keeps an IPv4 address as ::ffff:a.b.c.d in the table of GIDs."""
    with contextlib.suppress(OSError):
        wanted = socket.inet_aton(address).hex()
        for entry in sorted((port / "gids").iterdir(), key=lambda path: int(path.name)):
            gid = re.sub(r"[^0-9a-f]", "", _read(entry))
            if gid.endswith("ffff" + wanted) and "v2" in _read(
                port / "gid_attrs/types" / entry.name
            ):
                return int(entry.name)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def find_interface(asked: str | None, address: str) -> str:
    """The interface of the cluster's traffic: the one that was asked for, else that of
    `address`. Raises CLUSTER for none.
    """
    if asked:
        here = [name for _, name in socket.if_nameindex()]
        if asked not in here:
            what = f"this node has no network interface {asked}"
            action = (
                "correct NIBBLE_CLUSTER_INTERFACE, or unset it to use the one with this node's"
                " address"
            )
            raise NibbleError(
                ExitCode.CLUSTER, what=what, expected="one of " + ", ".join(here), action=action
            )
        return asked
    found = interface_of(address)
    if found is None:
        what = f"no network interface here has the address {address}"
        raise NibbleError(
            ExitCode.CLUSTER,
            what=what,
            expected="an address of this node",
            action="set WORKER_IP (HEAD_IP on the head) to an address of this machine, or"
            " NIBBLE_CLUSTER_INTERFACE",
        )
    return found


def network_environ(
    address: str, interface: str, devices: tuple[RdmaDevice, ...]
) -> Mapping[str, str]:
    """What vLLM, Gloo and NCCL need to meet over `interface`. Fixed names are wrong on the next
    machine.
    """
    found = {"VLLM_HOST_IP": address}
    found |= dict.fromkeys(
        ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), interface
    )
    if here := [device for device in devices if device.gid_index is not None]:
        found["NCCL_IB_HCA"] = ",".join(f"{device.name}:{device.port}" for device in here)
        if len(indexes := {device.gid_index for device in here}) == 1:
            found["NCCL_IB_GID_INDEX"] = str(indexes.pop())
    return found
