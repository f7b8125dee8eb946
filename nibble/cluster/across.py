"""Serving on several machines: a new run of vLLM after each lost node."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nibble.cluster.agent import Agent
from nibble.cluster.coordinator import Cluster, Say
from nibble.cluster.file_server import Offers
from nibble.cluster.head import head_handlers, running
from nibble.cluster.member import Member
from nibble.cluster.network import is_here, resolve
from nibble.cluster.node import find_place, node_handlers
from nibble.cluster.roster import Roster
from nibble.cluster.token import heads_token, members_token
from nibble.cluster.watch import NodeLost, Watch
from nibble.errors import ExitCode, NibbleError
from nibble.machine.processes import stop_signals

if TYPE_CHECKING:
    from nibble.plan.plan import Plan

# New runs after lost nodes. After that nibble exits, and the restart policy and the crash-loop
# breaker decide.
RESTARTS = 5


@contextlib.contextmanager
def open_cluster(
    plan: Plan, environ: Mapping[str, str], say: Say, stop: threading.Event
) -> Iterator[Cluster]:
    """The cluster of `plan`. Without Ray this process is its head. `stop` ends every wait.

    Raises CLUSTER if HEAD_IP is not an address of rank 0's machine.
    """
    settings, topology = plan.settings, plan.topology
    with tempfile.TemporaryDirectory(prefix="nibble-cluster-") as folder:
        if topology.mode == "ray":
            token = members_token(settings, environ, "serving through Ray")
            place = find_place(settings, environ, topology.head)
            yield Cluster(plan, place, token, None, Path(folder), say, stop, Offers())
            return
        if not is_here(resolve(str(topology.head), "HEAD_IP")):
            what = f"HEAD_IP {topology.head} is not an address of this machine, whose rank is 0"
            raise NibbleError(
                ExitCode.CLUSTER,
                what=what,
                expected="rank 0 on the head",
                action="set NIBBLE_NODE_RANK or HEAD_IP",
            )
        token, where = heads_token(settings, environ)
        place = find_place(settings, environ, None)
        roster = Roster(secrets.token_hex(8), expects=topology.nodes)
        offers = Offers()
        if Path(plan.model).is_dir():
            offers.add(Path(plan.model))
        handlers = head_handlers(roster) | node_handlers(place, plan) | offers.handlers()
        agent = Agent(place.address, token, handlers, offers.senders(), environ)
        gpus = len(plan.hardware.gpus)
        member = Member(place.address, token, place.address, "serve", 0, gpus, environ, place.facts)
        say(
            f"head of {topology.nodes} nodes at {place.address} ({place.interface}); token: {where}"
        )
        with running(agent), running(member):
            member.beat()
            yield Cluster(plan, place, token, roster, Path(folder), say, stop, offers)


def serve_across(
    plan: Plan,
    environ: Mapping[str, str],
    say: Say,
    run: Callable[[Mapping[str, str], Watch, Callable[[], None]], int],
) -> int:
    """Serve on several machines; the exit code of the last run.

    `run` starts vLLM: (environment, watch, on ready) -> exit code. A lost node ends the run. When
    the node returns, a new run starts, up to RESTARTS times. A stop signal between two runs ends
    the wait: process 1 of a container never receives a signal without a handler.

    Raises the last NodeLost after RESTARTS new runs.
    """
    stop = threading.Event()
    with (
        stop_signals(lambda signum: stop.set()),
        open_cluster(plan, environ, say, stop) as cluster,
        cluster.answering(),
        cluster.claim,
    ):
        lost: NodeLost | None = None
        for _ in range(RESTARTS + 1):
            if not cluster.prepare(lost):
                cluster.end(stopped=True)
                return ExitCode.OK
            code: int | None = None
            child_environ, watch = cluster.environ(environ), cluster.begin()
            try:
                code = run(child_environ, watch, cluster.ready)
                if stop.is_set() or not cluster.membership.head_stops:
                    return code
                code, lost = None, NodeLost(f"the Ray head at {cluster.head} stopped")
            except NodeLost as error:
                lost = error
            except NibbleError as error:
                lost = cluster.explain(error, watch)
            finally:
                cluster.end(stopped=code is not None)
            say(f"{lost.what}: the server is down until the cluster is complete again")
        assert lost is not None
        raise lost
