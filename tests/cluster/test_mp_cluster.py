"""Two machines without Ray: rank 0 with the API, rank 1 headless; one set of containers, in the order of their life."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_nodes import DEMO, TOKEN, Node, Stream, greedy, node

# Slow: minutes of containers that have not yet run from end to end on a machine of their own.
pytestmark = [pytest.mark.docker, pytest.mark.slow]

WORDS = ("serve", DEMO, "--max-model-len", "1024")
NAMED_S = 30.0  # the issue: which node, within 30 s


def ranks(**more: str) -> dict[str, str]:
    return {"NIBBLE_NNODES": "2", "HEAD_IP": "10.89.7.11", "TENSOR_PARALLEL_SIZE": "2", **more}


@pytest.fixture(scope="module")
def nodes(cpu_image: str, net: str) -> Iterator[tuple[Node, Node]]:
    """Rank 0 and rank 1, serving. Rank 1 restarts by itself."""
    again = ["--restart", "on-failure"]
    with (
        node(cpu_image, net, 11, *WORDS, **ranks(NIBBLE_NODE_RANK="0")) as head,
        node(cpu_image, net, 12, *WORDS, options=again, **ranks(NIBBLE_NODE_RANK="1")) as rank1,
    ):
        head.wait_ready()
        yield head, rank1


def lost(where: Node) -> str:
    """What rank 0's /status says while a node is missing."""
    return str(where.status().get("detail"))


def test_both_ranks_are_ready_and_the_answers_are_those_of_one_machine(
    nodes: tuple[Node, Node], one_machines_answers: list[str]
) -> None:
    head, rank1 = nodes
    rank1.wait_ready(20)
    assert rank1.status()["topology"]["node_rank"] == 1
    rank1.wait_for(lambda: rank1.container.health() == "healthy", 30, "healthy")
    assert "preflight: 2 nodes fit together" in head.logs()
    assert greedy(head) == one_machines_answers


def test_the_cluster_answers_only_with_its_token(nodes: tuple[Node, Node], cpu_image: str, net: str) -> None:
    head, _ = nodes
    ask = "from nibble.cli import main; import sys; sys.argv[1:] = ['cluster', 'status']; main()"
    said = head.python(ask, HEAD_IP=head.address)
    assert "rank 1" in said.stdout and "run 1 is ready" in said.stdout
    wrong = head.python(ask, HEAD_IP=head.address, NIBBLE_CLUSTER_TOKEN="0" * 64)
    assert wrong.returncode == 9
    assert wrong.stderr.count("\n") == 1 and "refused this token" in wrong.stderr
    assert TOKEN not in head.logs()


def test_a_second_node_of_the_same_rank_is_turned_away(
    nodes: tuple[Node, Node], cpu_image: str, net: str
) -> None:
    _, rank1 = nodes
    with node(cpu_image, net, 13, *WORDS, **ranks(NIBBLE_NODE_RANK="1")) as second:
        assert second.container.exit_code() == 9
        assert f"rank 1 is taken by {rank1.address}" in second.logs()


def test_a_second_head_is_turned_away(nodes: tuple[Node, Node], cpu_image: str, net: str) -> None:
    with node(cpu_image, net, 13, *WORDS, **ranks(NIBBLE_NODE_RANK="0")) as second:
        assert second.container.exit_code() == 9
        assert "no address of this machine" in second.logs()


def test_a_paused_node_is_named_and_the_service_comes_back_with_it(nodes: tuple[Node, Node]) -> None:
    head, rank1 = nodes
    stream = Stream(head, 900)
    assert stream.first_chunk()
    rank1.docker("pause")
    head.wait_for(lambda: not head.is_ready(), NAMED_S, "not ready")
    assert stream.ended_in_error(NAMED_S)
    head.wait_for(
        lambda: rank1.address in head.logs() and "no sign" in lost(head), NAMED_S, "naming the node"
    )
    assert head.leftovers() == []
    rank1.docker("unpause")
    head.wait_ready()
    assert greedy(head)


def test_a_killed_node_is_named_requests_end_and_nothing_is_left(nodes: tuple[Node, Node]) -> None:
    head, rank1 = nodes
    assert head.leftovers()
    stream = Stream(head, 900)
    assert stream.first_chunk()
    rank1.docker("kill")
    head.wait_for(lambda: not head.is_ready(), NAMED_S, "not ready")
    assert stream.ended_in_error(NAMED_S)
    head.wait_for(lambda: head.leftovers() == [], NAMED_S, "without leftovers")
    head.wait_for(lambda: "rank 1" in lost(head), NAMED_S, "naming the rank")


def test_rank_0_stopped_while_it_waits_ends_with_0(nodes: tuple[Node, Node]) -> None:
    head, _ = nodes
    head.docker("stop", "--time", "30")
    assert head.container.exit_code() == 0
