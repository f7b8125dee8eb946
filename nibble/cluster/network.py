"""This node's address, the network interface with that address, and its RDMA devices."""

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

import psutil

from nibble.errors import ExitCode, NibbleError
from nibble.settings.options import Settings

_SIOCGIFADDR = 0x8915  # linux/sockios.h
RESOLVE_S = 2.0
_OUTSIDE = "192.0.2.1"  # RFC 5737: any address outside of this machine
_SYS = Path("/sys")


@dataclass(frozen=True)
class RdmaDevice:
    """One RDMA port that is up. `gid_index` is the RoCE v2 entry of the node's IPv4 address, or
    None.
    """

    name: str
    port: int
    link: str
    interface: str
    gid_index: int | None


def node_address(settings: Settings, head: str | None) -> str:
    """The address at which other nodes reach this one.

    The first of these that is set: WORKER_IP; HEAD_IP on the head (`head` None); the address of
    NIBBLE_CLUSTER_INTERFACE; the address of the route to the head. Raises CLUSTER for an unknown
    name, or without a route.
    """
    if settings.worker_ip:
        return resolve(settings.worker_ip, "WORKER_IP")
    if head is None and settings.head_ip:
        return resolve(settings.head_ip, "HEAD_IP")
    if settings.cluster_interface and (address := address_of(settings.cluster_interface)):
        return address
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
    """The IPv4 address of `name`, the value of `variable`.

    Raises CLUSTER if the name is unknown or no name server answers within RESOLVE_S. The C library
    would wait 10 s or more and has no timeout parameter.
    """
    answers: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(socket.gethostbyname(name))
        except (OSError, UnicodeError) as error:  # UnicodeError: a name with an empty label
            answers.put(error)

    threading.Thread(target=ask, name="resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=RESOLVE_S)
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
    """Whether `address`, or the host name, belongs to this machine."""
    try:
        resolved = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(resolved[0], socket.SOCK_STREAM) as probe:
            probe.bind(resolved[4])
    except (OSError, UnicodeError):
        return False
    return True


def interface_of(address: str) -> str | None:
    """The network interface with the IPv4 address `address`, among several or alone, or None."""
    for name, entries in psutil.net_if_addrs().items():
        if any((entry.family, entry.address) == (socket.AF_INET, address) for entry in entries):
            return name.partition(":")[0]  # an address with a label is listed as eth0:label
    return "lo" if address.startswith("127.") else None


def address_of(interface: str) -> str | None:
    """The first IPv4 address of an interface; None if it has none or does not exist."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def mtu(interface: str) -> int | None:
    """The interface's MTU in bytes, or None if the kernel does not report it."""
    with contextlib.suppress(OSError, ValueError):
        return int((_SYS / "class/net" / interface / "mtu").read_text())
    return None


def rdma_devices(address: str, sys: Path = _SYS) -> tuple[RdmaDevice, ...]:
    """The RDMA ports that are up. RoCE ports have the GID index of `address`, which differs between
    nodes.
    """
    devices: list[RdmaDevice] = []
    for port in sorted(sys.glob("class/infiniband/*/ports/*")):
        state, link = _read(port / "state"), _read(port / "link_layer")
        if "ACTIVE" not in state:
            continue
        interface = _read(port / "gid_attrs/ndevs/0")
        devices.append(
            RdmaDevice(
                port.parent.parent.name, int(port.name), link, interface, _gid_index(port, address)
            )
        )
    return tuple(devices)


def _gid_index(port: Path, address: str) -> int | None:
    """The index of the RoCE v2 GID of `address`. The table stores an IPv4 address as
    ::ffff:a.b.c.d.
    """
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


def find_interface(requested: str | None, address: str) -> str:
    """The interface for the cluster's traffic: `requested`, else the one with `address`. Raises
    CLUSTER if it does not exist.
    """
    if requested:
        interfaces = [name for _, name in socket.if_nameindex()]
        if requested not in interfaces:
            what = f"this node has no network interface {requested}"
            action = (
                "correct NIBBLE_CLUSTER_INTERFACE, or unset it to use the one with this node's"
                " address"
            )
            raise NibbleError(
                ExitCode.CLUSTER,
                what=what,
                expected="one of " + ", ".join(interfaces),
                action=action,
            )
        return requested
    interface = interface_of(address)
    if interface is None:
        what = f"no network interface here has the address {address}"
        raise NibbleError(
            ExitCode.CLUSTER,
            what=what,
            expected="an address of this node",
            action="set WORKER_IP (HEAD_IP on the head) to an address of this machine, or"
            " NIBBLE_CLUSTER_INTERFACE",
        )
    return interface


def network_environ(
    address: str, interface: str, devices: tuple[RdmaDevice, ...]
) -> Mapping[str, str]:
    """The variables that connect vLLM, Gloo and NCCL over `interface`. Each node needs its own
    values, because names differ between machines.
    """
    environ = {"VLLM_HOST_IP": address}
    environ |= dict.fromkeys(
        ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), interface
    )
    if roce := [device for device in devices if device.gid_index is not None]:
        environ["NCCL_IB_HCA"] = ",".join(f"{device.name}:{device.port}" for device in roce)
        if len(indexes := {device.gid_index for device in roce}) == 1:
            environ["NCCL_IB_GID_INDEX"] = str(indexes.pop())
    return environ
