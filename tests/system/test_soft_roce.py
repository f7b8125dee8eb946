"""Two guests with soft RoCE: which device and GID nibble names, and that messages pass with them.

The guests have no GPU, so no vLLM runs over the link.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from typing import Any

import pytest

from nibble.cluster.facts import compare
from tests.support.debian import unpacked
from tests.support.system import guest
from tests.support.system.kernel import built_kernel

PACKAGES = ("ibverbs-utils", "libibverbs1", "ibverbs-providers", "libnl-3-200", "libnl-route-3-200")
Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each guest saw, by its role."""
    folder, kernel = tmp_path_factory.mktemp("roce"), built_kernel()
    tools = unpacked("ibverbs", "bookworm", PACKAGES)
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    guests = {}
    for role, end in zip(("head", "worker"), ends, strict=True):
        words = [sys.executable, "-m", "tests.system.in_guest.soft_roce", role, str(tools)]
        link = f"vec0:transport=fd,fd={end.fileno()},vec=1"
        guests[role] = guest.start_guest(
            kernel, folder / role, words, 1024, options=[link], pass_fds=[end.fileno()]
        )
    seen = {}
    try:
        for role, process in guests.items():
            ended = guest.wait_for_guest(process, folder / role, 180)
            assert ended.code == 0, ended.output
            seen[role] = json.loads(ended.output.splitlines()[-1])
    finally:
        for process in guests.values():
            guest.end_guest(process)
    return seen


def test_each_node_names_its_device_and_the_gid_of_its_cluster_address(found: Found) -> None:
    index = {}
    for role, seen in found.items():
        (device,) = seen["devices"]
        assert (device["name"], device["port"], device["link"]) == ("rxe0", 1, "Ethernet")
        assert device["interface"] == seen["environ"]["NCCL_SOCKET_IFNAME"] == "vec0"
        assert seen["environ"]["NCCL_IB_HCA"] == "rxe0:1"
        assert seen["environ"]["NCCL_IB_GID_INDEX"] == str(device["gid_index"])
        index[role] = device["gid_index"]
    assert index["head"] != index["worker"]  # the worker has another address before


def test_messages_pass_both_ways_with_that_device_and_gid(found: Found) -> None:
    for seen in found.values():
        assert seen["exchange"]["code"] == 0, seen["exchange"]["said"]
        assert re.search(r"200 iters in [\d.]+ seconds", seen["exchange"]["said"])


def test_the_preflight_accepts_both_and_names_the_node_with_a_cut_link(found: Found) -> None:
    def node(role: str, when: str) -> dict[str, Any]:
        return {"name": role, "skew_s": 0.0, "facts": found[role][when] | {"gpus": 1}}

    assert compare([node("head", "facts"), node("worker", "facts")]) == []
    for lost, other in (("head", "worker"), ("worker", "head")):
        problems = compare([node(other, "facts"), node(lost, "facts_when_cut")])
        assert [problem.node for problem in problems] == [lost]
        assert problems[0].what.startswith("it has no RDMA device with a GID of its address")
