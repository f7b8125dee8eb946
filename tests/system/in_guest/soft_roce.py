"""In one of two guests (tests/system/test_soft_roce.py): soft RoCE on the link between them.

    python -m tests.system.in_guest.soft_roce head|worker FOLDER

Prints a JSON object. FOLDER has the files of ibverbs-utils.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nibble.cluster import facts
from nibble.cluster.network import find_interface, network_environ, rdma_devices

LINK = "vec0"
ADDRESSES = {"head": "10.9.0.1", "worker": "10.9.0.2"}
DISK = Path("/")  # this machine's
FIRST = "10.8.0.2"  # on the worker alone, so that GID indexes differ


def run(*words: str) -> None:
    subprocess.run(words, check=True)


def connect(role: str) -> str:
    """Bring up the link with this node's addresses and an RDMA device; this node's address."""
    run("ip", "link", "set", LINK, "up")
    mine = [FIRST, ADDRESSES[role]] if role == "worker" else [ADDRESSES[role]]
    for address in mine:
        run("ip", "address", "add", f"{address}/24", "dev", LINK)
    run("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", LINK)
    return ADDRESSES[role]


def exchange(role: str, tools: Path, device: str, gid_index: int) -> dict[str, Any]:
    """200 messages each way over a reliable connection, by a program of rdma-core."""
    libraries = tools / "usr/lib/x86_64-linux-gnu"
    environ = os.environ | {  # Debian 12's libnl-3-200 has its file in /lib
        "LD_LIBRARY_PATH": f"{libraries}:{tools / 'lib/x86_64-linux-gnu'}",
        "RDMAV_DRIVERS": str(libraries / "libibverbs/librxe"),
    }
    command = [str(tools / "usr/bin/ibv_rc_pingpong"), "-d", device, "-n", "200"]
    command += ["-g", str(gid_index)]
    peer = [] if role == "head" else [ADDRESSES["head"]]
    for _ in range(60):  # the other guest may be later
        done = subprocess.run(
            [*command, *peer], env=environ, capture_output=True, text=True, check=False, timeout=120
        )
        if done.returncode == 0 or "connect" not in done.stderr:
            break
        time.sleep(1)
    return {"code": done.returncode, "said": done.stdout + done.stderr}


def main(role: str, folder: str) -> None:
    address = connect(role)
    time.sleep(1)  # the kernel fills the table of GIDs
    interface = find_interface(None, address)
    devices = rdma_devices(address)
    found: dict[str, Any] = {"devices": [asdict(device) for device in devices]}
    found["environ"] = dict(network_environ(address, interface, devices))
    found["facts"] = facts.collect(address, interface, os.environ, DISK)
    (device,) = devices
    if device.gid_index is not None:
        found["exchange"] = exchange(role, Path(folder), device.name, device.gid_index)
    run("ip", "link", "set", LINK, "down")
    time.sleep(1)
    found["facts_when_cut"] = facts.collect(address, interface, os.environ, DISK)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
