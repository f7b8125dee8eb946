"""Where ranks run, decided from settings and flags alone."""

from __future__ import annotations

import pytest

from nibble.errors import ExitCode, NibbleError
from nibble.plan.topology import find_topology, topology_flags
from nibble.settings.options import Settings
from nibble.settings.sources import load_settings

TWO = {"--tensor-parallel-size": 2}


def settings(**environ: str) -> Settings:
    return load_settings({}, environ).settings


def flags_of(topology) -> dict:
    return {name: value for name, (value, _) in topology_flags(topology).items()}


def test_ranks_that_fit_this_machine_need_no_cluster() -> None:
    for given in (settings(), settings(HEAD_IP="192.0.2.2")):
        found = find_topology(given, TWO, 2)
        assert (found.mode, found.ranks, found.ranks_here) == ("machine", 2, 2)
        assert flags_of(found) == {}


def test_an_address_of_a_head_means_ray_where_the_ranks_do_not_fit() -> None:
    found = find_topology(settings(HEAD_IP="192.0.2.2"), TWO, 1)
    assert (found.mode, found.ranks_here) == ("ray", 1)
    assert flags_of(found) == {"--distributed-executor-backend": "ray"}


def test_one_node_is_this_machine_whatever_else_is_set() -> None:
    assert find_topology(settings(HEAD_IP="192.0.2.2"), {**TWO, "--nnodes": 1}, 1).mode == "machine"


def test_a_number_of_nodes_means_vllms_own_way() -> None:
    values = {**TWO, "--pipeline-parallel-size": 2, "--nnodes": 2, "--node-rank": 1}
    found = find_topology(settings(HEAD_IP="192.0.2.2"), values, 2)
    assert (found.mode, found.ranks, found.ranks_here, found.is_headless) == ("mp", 4, 2, True)
    assert flags_of(found) == {
        "--distributed-executor-backend": "mp",
        "--master-addr": "192.0.2.2",
        "--master-port": 29501,
        "--headless": True,
    }


def test_rank_0_has_the_api() -> None:
    found = find_topology(
        settings(HEAD_IP="192.0.2.2"), {**TWO, "--nnodes": 2, "--node-rank": 0}, 1
    )
    assert not found.is_headless
    assert "--headless" not in flags_of(found)


def test_data_parallel_ranks_are_counted() -> None:
    found = find_topology(
        settings(HEAD_IP="h"), {**TWO, "--data-parallel-size": 2, "--nnodes": 2}, 2
    )
    assert (found.ranks, found.ranks_here) == (4, 2)


@pytest.mark.parametrize(
    ("local", "here"),
    [({}, 8), ({"-size-local": "2"}, 4), ({"-rank": 3}, 2), ({"-size-local": "0"}, 2)],
)
def test_data_parallel_replicas_of_other_servers_need_no_gpus_here(local: dict, here: int) -> None:
    values = {**TWO, "--data-parallel-size": 4} | {
        f"--data-parallel{name}": value for name, value in local.items()
    }
    found = find_topology(settings(), values, 8)
    assert (found.mode, found.ranks, found.ranks_here) == ("machine", 8, here)


@pytest.mark.parametrize(
    ("environ", "values", "code", "words"),
    [
        ({}, {"--nnodes": 2, **TWO}, ExitCode.USAGE, "HEAD_IP"),
        ({"NIBBLE_CLUSTER": "ray"}, TWO, ExitCode.USAGE, "HEAD_IP"),
        ({}, {"--data-parallel-backend": "ray"}, ExitCode.USAGE, "HEAD_IP"),
        (
            {"HEAD_IP": "h"},
            {"--nnodes": 2, "--node-rank": 2, **TWO},
            ExitCode.USAGE,
            "NIBBLE_NODE_RANK is 2",
        ),
        ({}, {"--data-parallel-size": "0"}, ExitCode.CONFIG, "--data-parallel-size is 0"),
        ({"HEAD_IP": "h"}, {"--node-rank": 1}, ExitCode.USAGE, "NIBBLE_NNODES is unset"),
        (
            {"HEAD_IP": "h"},
            {"--nnodes": 3, **TWO},
            ExitCode.CONFIG,
            "2 ranks cannot be divided over 3",
        ),
        (
            {"HEAD_IP": "h", "NIBBLE_CLUSTER": "ray"},
            {"--nnodes": 2},
            ExitCode.CONFIG,
            "NIBBLE_NNODES is set",
        ),
        ({"HEAD_IP": "h", "NIBBLE_CLUSTER": "mp"}, TWO, ExitCode.USAGE, "expected NIBBLE_NNODES"),
    ],
)
def test_what_cannot_be_is_one_error(
    environ: dict, values: dict, code: ExitCode, words: str
) -> None:
    with pytest.raises(NibbleError, match=words) as caught:
        find_topology(settings(**environ), values, 1)
    assert caught.value.code == code
