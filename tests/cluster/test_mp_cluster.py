"""Two machines without Ray: rank 0 with the API, rank 1 headless; one set of containers, in the
order of their life.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster.cluster_nodes import (
    DEMO,
    NAMED_S,
    TOKEN,
    ControlPort,
    Node,
    Stream,
    greedy,
    node,
)

pytestmark = [pytest.mark.docker, pytest.mark.slow]

WORDS = ("serve", DEMO, "--max-model-len", "1024")
STATUS = "from nibble.cli.app import main; import sys; sys.argv[1:] = ['cluster', 'status']; main()"
CHECK = STATUS.replace("status", "check")


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


def said(head: Node) -> str:
    """What rank 0's /status says while a node is missing."""
    return str(head.status().get("detail"))


def must_name_the_loss(head: Node, stream: Stream, words: str) -> None:
    """The request in flight ends in an error, /ready closes, and /status says `words`."""
    stream.must_end_in_error(NAMED_S)
    head.wait_for(lambda: not head.is_ready() and words in said(head), NAMED_S, f"saying {words!r}")


def test_both_ranks_are_ready_and_the_answers_are_those_of_one_machine(
    one_machines_answers: list[str], nodes: tuple[Node, Node], client: Node
) -> None:
    head, rank1 = nodes
    rank1.wait_ready(20)
    assert rank1.status()["topology"]["node_rank"] == 1
    rank1.wait_for(lambda: rank1.container.health() == "healthy", 30, "healthy")
    assert "preflight: 2 nodes are compatible" in head.logs()
    assert greedy(client, head) == one_machines_answers


def test_what_the_workers_of_both_ranks_prove_is_in_the_heads_status(
    nodes: tuple[Node, Node],
) -> None:
    head, rank1 = nodes
    told = head.status()
    assert [one["node"] for one in told["assertion"]["ran"]] == ["", f"{rank1.address} (rank 1)"]
    assert (told["assertion"]["verdict"], told["canary"]["verdict"]) == ("passed", "passed")


def test_the_cluster_answers_only_with_its_token(nodes: tuple[Node, Node]) -> None:
    head, _ = nodes
    right = head.python(STATUS, HEAD_IP=head.address)
    assert "rank 1" in right.stdout and "run 1 is ready" in right.stdout
    wrong = head.python(STATUS, HEAD_IP=head.address, NIBBLE_CLUSTER_TOKEN="0" * 64)
    assert wrong.returncode == 9
    assert wrong.stderr.count("\n") == 1 and "refused this token" in wrong.stderr
    assert TOKEN not in head.logs()


def test_a_check_leaves_a_server_alone_and_says_so(nodes: tuple[Node, Node]) -> None:
    head, _ = nodes
    checked = head.python(CHECK, HEAD_IP=head.address)
    assert (checked.returncode, "nothing was checked" in checked.stderr) == (9, True)
    assert head.is_ready()


def test_a_second_node_of_the_same_rank_is_turned_away(
    nodes: tuple[Node, Node], cpu_image: str, net: str
) -> None:
    head, rank1 = nodes
    with node(cpu_image, net, 13, *WORDS, **ranks(NIBBLE_NODE_RANK="1")) as second:
        assert second.container.exit_code() == 9
        assert f"{rank1.address} has rank 1" in second.logs()
    assert head.is_ready()


def test_a_second_head_is_turned_away(nodes: tuple[Node, Node], cpu_image: str, net: str) -> None:
    head, _ = nodes
    with node(cpu_image, net, 13, *WORDS, **ranks(NIBBLE_NODE_RANK="0")) as second:
        assert second.container.exit_code() == 9
        assert "is not an address of this machine" in second.logs()
    assert head.is_ready()


def test_a_paused_node_is_named_and_the_service_comes_back_with_it(
    nodes: tuple[Node, Node], client: Node
) -> None:
    head, rank1 = nodes
    stream = Stream(client, head)
    with ControlPort(head) as control:
        rank1.pause()
        must_name_the_loss(head, stream, "no sign")
        shown = head.container.exec("nibble", "status")
        assert (shown.returncode, "no sign" in shown.stdout) == (0, True), (
            shown.stdout + shown.stderr
        )
        assert f"node {rank1.address} (rank 1)" in head.logs()
        assert head.leftovers() == []
        rank1.docker("unpause")
        head.wait_ready()
    assert control.asked > 100
    assert control.refused == 0, control.states
    assert greedy(client, head)


def test_a_node_that_is_cut_off_ends_its_part_and_the_service_comes_back_with_it(
    nodes: tuple[Node, Node], client: Node
) -> None:
    head, rank1 = nodes
    stream = Stream(client, head)
    rank1.cut()
    must_name_the_loss(head, stream, "no sign")
    rank1.wait_for(lambda: rank1.leftovers() == [], NAMED_S, "without leftovers")
    assert "no answer from the head" in rank1.logs()
    rank1.join()
    head.wait_ready()
    assert greedy(client, head)


def test_a_killed_head_ends_every_rank_and_the_service_comes_back_with_it(
    nodes: tuple[Node, Node], client: Node
) -> None:
    head, rank1 = nodes
    stream = Stream(client, head)
    head.docker("kill")
    stream.must_end_in_error(NAMED_S)
    rank1.wait_for(
        lambda: not rank1.is_ready() and rank1.leftovers() == [], NAMED_S, "without leftovers"
    )
    head.docker("start")
    head.wait_ready()
    assert greedy(client, head)


def test_a_killed_node_is_named_requests_end_and_nothing_is_left(
    nodes: tuple[Node, Node], client: Node
) -> None:
    head, rank1 = nodes
    assert head.leftovers()
    stream = Stream(client, head)
    rank1.docker("kill")
    must_name_the_loss(head, stream, "rank 1")
    head.wait_for(lambda: head.leftovers() == [], NAMED_S, "without leftovers")
    assert f"node {rank1.address} (rank 1)" in head.logs()


def test_rank_0_stopped_while_it_waits_ends_with_0(nodes: tuple[Node, Node]) -> None:
    head, _ = nodes
    head.docker("stop", "--time", "30")
    assert head.container.exit_code() == 0
