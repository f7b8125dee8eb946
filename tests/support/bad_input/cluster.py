"""Rows about several machines."""

from __future__ import annotations

from tests.support.bad_input.case import (
    Case,
    Row,
    row,
    serve,
)


def cluster_rows() -> list[Row]:
    """Several machines that cannot be meant so."""
    return [
        row(
            "nnodes-without-head",
            "`NIBBLE_NNODES` without `HEAD_IP`",
            2,
            "… the address of rank 0; expected HEAD_IP; set HEAD_IP to the same"
            " address on all of them",
            serve("{model}", NIBBLE_NNODES="2", TENSOR_PARALLEL_SIZE="2"),
        ),
        row(
            "node-rank-beyond",
            "`NIBBLE_NODE_RANK` beyond the number of nodes, or without it",
            2,
            "NIBBLE_NODE_RANK is 2, but NIBBLE_NNODES is …; expected …; …",
            serve(
                "{model}",
                NIBBLE_NNODES="2",
                NIBBLE_NODE_RANK="2",
                HEAD_IP="127.0.0.1",
                TENSOR_PARALLEL_SIZE="2",
            ),
            serve("{model}", NIBBLE_NODE_RANK="2"),
        ),
        row(
            "ranks-not-divisible",
            "ranks that cannot be divided over the nodes",
            5,
            "2 ranks cannot be divided over 3 machines; expected a multiple of 3; …",
            serve("{model}", NIBBLE_NNODES="3", HEAD_IP="127.0.0.1", TENSOR_PARALLEL_SIZE="2"),
        ),
        row(
            "ray-with-nnodes",
            "`NIBBLE_CLUSTER=ray` together with `NIBBLE_NNODES`",
            5,
            "NIBBLE_NNODES is set, but the cluster is Ray's; expected one of them; …",
            serve("{model}", NIBBLE_CLUSTER="ray", NIBBLE_NNODES="2", HEAD_IP="127.0.0.1"),
        ),
        row(
            "ray-node-words",
            "a model, or an option that only `serve` reads, for `ray-head` or `ray-worker`",
            2,
            "`ray-…` …; expected the flags that `nibble ray-… --help` shows; drop it, or give it to"
            " `nibble serve`",
            Case(("ray-head", "extra")),
            Case(("ray-worker", "--max-model-len", "4096")),
            Case(("ray-worker", "--enforce-eager")),
        ),
        row(
            "cluster-without-token",
            "a Ray worker, a server on Ray or a headless rank without the cluster's token",
            2,
            "… needs the cluster's token; expected RAY_AUTH_TOKEN_FILE; copy the file that the head"
            " printed, here to …",
            Case(("ray-worker",), {"HEAD_IP": "127.0.0.1"}),
            Case(("cluster", "status"), {"HEAD_IP": "127.0.0.1"}),
        ),
        row(
            "cluster-unknown-head",
            "`HEAD_IP` is an unknown name, for `cluster check`, `ray-worker`, `ray-head` and"
            " `serve` on several machines",
            9,
            "HEAD_IP no-such-host.invalid is neither an IPv4 address nor a known name (…);"
            " expected a"
            " node's address; correct HEAD_IP",
            Case(
                ("cluster", "check"),
                {"HEAD_IP": "no-such-host.invalid", "NIBBLE_CLUSTER_TOKEN": "some-token"},
            ),
            Case(
                ("ray-worker",),
                {"HEAD_IP": "no-such-host.invalid", "NIBBLE_CLUSTER_TOKEN": "some-token"},
            ),
            Case(("ray-head",), {"HEAD_IP": "no-such-host.invalid"}),
            serve(
                "{model}",
                NIBBLE_CLUSTER="ray",
                HEAD_IP="no-such-host.invalid",
                NIBBLE_CLUSTER_TOKEN="some-token",
            ),
        ),
        row(
            "cluster-without-head",
            "`nibble cluster` where no head runs",
            9,
            "no head answers at 127.0.0.1 (…); expected a running head; set HEAD_IP to its address",
            Case(
                ("cluster", "status"),
                {"HEAD_IP": "127.0.0.1", "NIBBLE_CLUSTER_TOKEN": "some-token"},
            ),
            Case(
                ("cluster", "check"), {"HEAD_IP": "127.0.0.1", "NIBBLE_CLUSTER_TOKEN": "some-token"}
            ),
        ),
        row(
            "manifest-kind",
            "`nibble cluster manifest` of an unknown kind",
            2,
            "there is no manifest 'helm'; expected kuberay or lws; …",
            Case(("cluster", "manifest", "helm", "{model}")),
        ),
    ]
