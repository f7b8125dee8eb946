"""Ray's books after a node was cut off: what the head gave away in vain does not stay taken."""

from __future__ import annotations

import time

import pytest

from tests.support.cluster.cluster_nodes import TOKEN, Node, node

pytestmark = [pytest.mark.docker, pytest.mark.slow]

HEAD, WORKER = "10.89.7.71", "10.89.7.72"
RAY = {"HEAD_IP": HEAD, "NUM_GPUS": "1"}
KEY = {"RAY_ADDRESS": f"{HEAD}:6379", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
# so long that the head's connection then takes about as long to notice that the node is back
CUT_S = 60.0
PLACE = """
import ray, sys
from ray.util.placement_group import placement_group
ray.init(log_to_driver=False)
sys.exit(not placement_group([{"GPU": 1.0}] * 2).wait(float(sys.argv[1])))
"""
REACH = """
import os, sys, threading
from nibble.cluster.ray_reach import unreached
sys.exit(unreached(sys.argv[1:], os.environ, threading.Event()))
"""


def test_a_gpu_that_the_head_gave_away_in_vain_is_free_again_before_vllm_asks_for_it(
    cpu_image: str, net: str
) -> None:
    again = ["--restart", "on-failure"]
    with (
        node(cpu_image, net, 71, "ray-head", **RAY) as head,
        node(cpu_image, net, 72, "ray-worker", options=again, **RAY) as worker,
    ):
        worker.wait_for(lambda: joined(worker) == 1, 120, "joined")
        assert head.python(PLACE, "20", **KEY).returncode == 0
        worker.cut()
        time.sleep(CUT_S)
        worker.join()
        worker.wait_for(lambda: joined(worker) == 2, 60, "joined again")
        # In vain where the head still talks into the old connection
        head.python(PLACE, "45", **KEY)
        reached = head.python(REACH, HEAD, WORKER, **KEY)
        assert reached.returncode == 0, reached.stderr[-2000:]
        assert head.python(PLACE, "20", **KEY).returncode == 0


def joined(worker: Node) -> int:
    return worker.logs().count("has joined")
