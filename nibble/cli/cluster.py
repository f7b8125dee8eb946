"""`nibble cluster status|check|manifest`: several machines that serve one model."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from nibble.cli.common import FREE_WORDS, Words, print_json, say, wanted
from nibble.errors import ExitCode

app = typer.Typer(no_args_is_help=True, help="Several machines that serve one model.")


@app.command("status", context_settings=FREE_WORDS)
def cluster_status(words: Words = None) -> None:
    """Show the nodes that the head knows, and lost ones."""
    from nibble.cli.cluster_head import cluster_nodes, node_rows
    from nibble.plan.gather import read_wishes

    asked = read_wishes(wanted(words, "cluster status"), dict(os.environ), ("--json",))
    found = cluster_nodes(asked)
    if "--json" in asked.command.rest:
        print_json(found)
        return
    for row in node_rows(found):
        print("  ".join(row))
    if any(node["role"] == "serve" for node in found["nodes"]):  # a Ray head knows of no runs
        print(f"run {found['run']} is {found['state']}")


@app.command("check", context_settings=FREE_WORDS)
def cluster_check(words: Words = None) -> None:
    """Run the checks of a start alone. All nodes are present (--nnodes), compatible and reachable,
    with equal sums of an all-reduce. With MODEL: present or downloadable on each node, and enough
    memory.
    """
    from nibble.cli.cluster_head import cluster_check as check
    from nibble.cli.cluster_head import network_lines
    from nibble.plan.gather import read_wishes

    asked = read_wishes(wanted(words, "cluster check"), dict(os.environ), ("--json",))
    report = check(asked, say)
    if "--json" in asked.command.rest:
        print_json(report.to_json())
    else:
        for problem in report.problems:
            print(f"node {problem.node}: {problem.what}; {problem.action}")
        for line in network_lines(report):
            print(line)
        if report.reduce:
            found = report.reduce
            print(
                f"all-reduce over {found['nodes']} nodes: {found['gb_per_s']} GB/s"
                f" ({found['backend']})"
            )
    raise typer.Exit(ExitCode.CLUSTER if report.problems else ExitCode.OK)


@app.command("manifest", context_settings=FREE_WORDS)
def cluster_manifest(
    kind: Annotated[str, typer.Argument(help="Kind of manifest: kuberay or lws.")],
    words: Words = None,
    image: Annotated[str, typer.Option(help="Image of every pod.")] = "nibble:b200",
    shm: Annotated[
        str | None, typer.Option(help="Maximum size of /dev/shm, such as 16Gi; counts as memory.")
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            help="Cache that outlives pods: the name of a PersistentVolumeClaim, or an absolute"
            " path on every node. Default: an empty folder for each pod."
        ),
    ] = None,
    rdma: Annotated[
        str | None,
        typer.Option(
            help="Resource of the RDMA device plugin, such as rdma/hca_shared_devices_a or"
            " nic/rdma=4; the pods then run as root with IPC_LOCK alone."
        ),
    ] = None,
    host_network: Annotated[
        bool, typer.Option("--host-network", help="Use of the nodes' network by the pods.")
    ] = False,
) -> None:
    """Print a Kubernetes manifest, as JSON for `kubectl apply -f -`. It serves the plan of MODEL
    and FLAGS.
    """
    from nibble.cli.manifest_options import PodOptions, with_options
    from nibble.cli.manifests import carried, manifest, read_kind, words_for
    from nibble.plan.gather import plan_for, read_wishes

    kind, *words = wanted([kind, *(words or ())], "cluster manifest")
    asked = read_wishes(words, dict(os.environ))
    environ = carried(asked, dict(os.environ))
    words = words_for(asked.command)
    found = manifest(read_kind(kind), plan_for(asked), words, image, environ)
    print_json(with_options(found, PodOptions(shm, cache, rdma, host_network)))
