"""A head and two workers with a third of the model's layers each: pipeline parallelism across
machines, with Ray and without.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.cluster.cluster_nodes import DEMO, Node, Serve, greedy, node

pytestmark = [pytest.mark.docker, pytest.mark.slow]

CHECK = "from nibble.cli.app import main; import sys; sys.argv[1:] = ['cluster', 'check']; main()"
STAGES = {"NIBBLE_PIPELINE_PARALLEL_SIZE": "3"}


def test_three_stages_with_ray_pass_the_check_and_answer_as_one_machine(
    one_machines_answers: list[str], cpu_image: str, net: str, client: Node, tmp_path: Path
) -> None:
    ray = {"HEAD_IP": "10.89.7.41", "NUM_GPUS": "1"}
    with ExitStack() as stack:
        head = stack.enter_context(node(cpu_image, net, 41, "ray-head", **ray))
        head.wait_for(lambda: "Ray head is up" in head.logs(), 90, "up")
        workers = [
            stack.enter_context(node(cpu_image, net, one, "ray-worker", **ray)) for one in (42, 43)
        ]
        for worker in workers:
            worker.wait_for(lambda worker=worker: "has joined" in worker.logs(), 90, "joined")
        checked = head.python(CHECK)
        assert (checked.returncode, "all-reduce over 3 nodes" in checked.stdout) == (
            0,
            True,
        ), checked.stdout
        serve = Serve(head, tmp_path / "log", DEMO, **STAGES)
        try:
            serve.wait_ready()
            assert greedy(client, head) == one_machines_answers
            assert all(worker.parts() for worker in workers)
        finally:
            serve.process.kill()


def test_three_stages_without_ray_answer_as_one_machine(
    one_machines_answers: list[str], cpu_image: str, net: str, client: Node
) -> None:
    ranks = {"NIBBLE_NNODES": "3", "HEAD_IP": "10.89.7.51", **STAGES}
    words = ("serve", DEMO, "--max-model-len", "1024")
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                node(cpu_image, net, 51 + rank, *words, NIBBLE_NODE_RANK=str(rank), **ranks)
            )
            for rank in range(3)
        ]
        nodes[0].wait_ready()
        assert greedy(client, nodes[0]) == one_machines_answers
        assert "preflight: 3 nodes are compatible" in nodes[0].logs()
