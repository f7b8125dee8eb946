"""What keeps nodes from serving together, and how their network is found."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nibble.cli import cluster_head as commands
from nibble.cli import serve as serve_module
from nibble.cluster import facts, network
from nibble.cluster import node as node_module
from nibble.cluster.facts import SAME, compare, hub_state, model_state
from nibble.cluster.lock import Claim
from nibble.cluster.network import RdmaDevice, interface_of, is_here, network_environ, rdma_devices
from nibble.cluster.node import Place, find_place, node_handlers, unreachable
from nibble.cluster.preflight import Caller, Report, judge, preflight
from nibble.cluster.ray_node import ray_head, ray_worker
from nibble.errors import ExitCode, NibbleError
from nibble.hub.pull import pull
from nibble.plan.cluster_ports import AGENT_PORT, GCS_PORT, MASTER_PORT, rank_0_ports
from nibble.plan.gather import Asked, read_wishes
from tests.support.servers.hub import Hub

FACTS = {
    **dict.fromkeys(SAME, "same"),
    "memory_available_bytes": 8 << 30,
    "disk_free_bytes": 9 << 30,
}


def node(name: str, skew_s: float = 0.0, **facts: Any) -> dict[str, Any]:
    return {"name": name, "skew_s": skew_s, "facts": {**FACTS, **facts}}


def test_equal_nodes_fit_together() -> None:
    assert compare([node("a"), node("b"), node("c")]) == []


@pytest.mark.parametrize("fact", SAME)
def test_every_difference_names_the_node_and_what_to_do(fact: str) -> None:
    changed: dict[str, Any] = {fact: "other"}
    (problem,) = compare([node("a"), node("b", **changed)])
    assert (problem.node, problem.action) == ("b", SAME[fact])
    assert f"{fact} is 'other' and 'same' on a" in problem.what


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (node("b", skew_s=-7), "its clock differs by -7 s"),
        (node("b", disk_free_bytes=1 << 30), "only 1.0 GiB of disk"),
        (node("b", memory_available_bytes=1 << 30), "but the plan needs 2.0 GiB"),
    ],
)
def test_what_a_node_lacks_by_itself(one: dict[str, Any], words: str) -> None:
    (problem,) = compare([node("a"), one], least_memory_bytes=2 << 30)
    assert words in problem.what


def test_the_first_problem_is_the_error_and_the_others_are_counted() -> None:
    problems = compare([node("a"), node("b", vllm="x"), node("c", torch="y")])
    with pytest.raises(NibbleError, match=r"node b: vllm is 'x'.*\(and 1 more") as caught:
        Report([], problems, None).demand()
    assert caught.value.code == ExitCode.CLUSTER


def answer(
    name: str, rate: float, library: str | None = None, backend: str = "gloo"
) -> dict[str, Any]:
    return {"node": name, "gb_per_s": rate, "library": library, "backend": backend, "right": True}


def test_the_slowest_rank_is_held_to_the_pass_mark() -> None:
    found, problems = judge([answer("a", 0.5), answer("b", 0.005)], None)
    assert (found["gb_per_s"], found["least_gb_per_s"]) == (0.005, 0.01)
    assert problems[0].node == "b" and "below 0.01" in problems[0].what
    assert judge([answer("a", 0.5), answer("b", 0.005)], 0)[1] == []


def test_gpus_have_a_higher_mark_and_the_same_nccl() -> None:
    _, problems = judge(
        [answer("a", 2.0, "/x/nccl", "nccl"), answer("b", 0.9, "/y/nccl", "nccl")], None
    )
    assert [problem.node for problem in problems] == ["b", "b"]
    assert "it loaded /y/nccl and a /x/nccl" in problems[0].what


def test_one_node_with_all_ranks_has_no_network_to_measure() -> None:
    found, problems = judge([answer("a", 0.0, "/x/nccl", "nccl")], None)
    assert (problems, found["nodes"]) == ([], 1)


@dataclass(frozen=True)
class Nodes(Caller):
    """Nodes with the same facts, whose all-reduce is what `reduce` says; on `taken` something
    listens; `models` says where the model is not here.
    """

    head: str = "a"
    token: str = "token"
    environ: Mapping[str, str] = field(default_factory=dict)
    reduce: Callable[[str], dict[str, Any]] = lambda address: answer(address, 0.1)
    taken: Sequence[int] = ()
    models: Mapping[str, str] = field(default_factory=dict)
    listened: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    reached: dict[str, list[tuple[str, int]]] = field(default_factory=dict)

    def ask(
        self, address: str, path: str, body: Mapping[str, Any], timeout_s: float = 0.0
    ) -> dict[str, Any]:
        if path == "/allreduce":
            return self.reduce(address)
        if path == "/listen":
            self.listened.append((address, tuple(body["ports"])))
            return {"taken": [port for port in body["ports"] if port in self.taken]}
        if path == "/reach":
            self.reached[address] = body["targets"]
            return {"unreachable": []}
        if path == "/checkpoints":
            return {"checkpoints": {}}
        on_hub = [body["hub"]["model"]] if body.get("hub") else []
        found = {
            one: self.models.get(address, "here") for one in [*body.get("models", ()), *on_hub]
        }
        return FACTS | {"models": found}


def check(
    caller: Caller,
    *names: str,
    over: threading.Event | None = None,
    has_ray: bool = False,
    **more: Any,
) -> Report:
    nodes = [node(name) | {"address": name} for name in names]
    return preflight(caller, nodes, has_ray=has_ray, least_gb_per_s=None, over=over, **more)


def test_the_port_of_vllms_own_way_is_reached_on_rank_0_and_free_again_afterwards() -> None:
    nodes = Nodes()
    assert check(nodes, "a", "b", "c").problems == []
    assert nodes.listened == [("a", (MASTER_PORT,)), ("a", ())]
    assert set(nodes.reached["b"]) == {("a", AGENT_PORT), ("c", AGENT_PORT), ("a", MASTER_PORT)}
    assert set(nodes.reached["a"]) == {("b", AGENT_PORT), ("c", AGENT_PORT)}


def test_a_port_of_vllms_own_way_that_another_program_has_is_a_problem() -> None:
    nodes = Nodes(taken=(MASTER_PORT,))
    (problem,) = check(nodes, "a", "b").problems
    assert (problem.node, problem.what) == ("a", "another program uses vLLM's port 29501")
    assert nodes.listened[-1] == ("a", ())


def test_with_ray_every_node_reaches_the_nodes_ports_and_the_last_of_the_worker_processes() -> None:
    nodes = Nodes(taken=(20999,))  # a worker process of Ray's may have it
    assert check(nodes, "a", "b", has_ray=True).problems == []
    assert {port for address, port in nodes.reached["b"] if address == "a"} >= {
        AGENT_PORT,
        GCS_PORT,
        *range(6380, 6385),
        20999,
    }
    assert sorted(nodes.listened[:2]) == [("a", (20999,)), ("b", (20999,))]
    assert sorted(nodes.listened[2:]) == [("a", ()), ("b", ())]


def test_vllms_own_ports_on_rank_0_are_those_of_its_flags() -> None:
    assert rank_0_ports({"--tensor-parallel-size": 2}) == [29501]
    assert rank_0_ports({"--data-parallel-size": 2}) == [29501, 29550]
    assert rank_0_ports(
        {"--data-parallel-size": "2", "--data-parallel-rpc-port": 5, "--master-port": 4}
    ) == [
        4,
        5,
    ]


def test_an_agent_listens_as_long_as_it_is_told_and_names_a_port_that_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_module, "REACH_S", 0.2)
    listen = node_handlers(Place("127.0.0.1", "lo", {}, Path("/tmp")))["/listen"]
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_server(("127.0.0.1", 0)) as free,
    ):
        taken, port = other.getsockname()[1], free.getsockname()[1]
        free.close()
        assert unreachable([("127.0.0.1", port)])
        assert listen({"ports": [port, taken]}) == {"taken": [taken]}
        assert unreachable([("127.0.0.1", port)]) == []
        assert listen({"ports": []}) == {"taken": []}
        assert unreachable([("127.0.0.1", port)])


def test_two_preflights_at_once_do_not_take_each_other_for_another_program() -> None:
    """`cluster check` beside `serve`."""
    listen = node_handlers(Place("127.0.0.1", "lo", {}, Path("/tmp")))["/listen"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    taken: list[int] = []

    def ask() -> None:
        for _ in range(300):
            taken.extend(listen({"ports": [port]})["taken"])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not taken
    listen({"ports": []})


def test_a_port_that_opens_a_moment_later_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = free.getsockname()
    opened: list[socket.socket] = []
    threading.Timer(0.5, lambda: opened.append(socket.create_server(place))).start()
    assert unreachable([place]) == []
    opened[0].close()


def rdma(gid: int | None, link: str = "Ethernet") -> dict[str, Any]:
    device = RdmaDevice("rocep1s0f0", 1, link, "enp1s0f0np0", gid)
    return {"rdma": [asdict(device)], "gpus": 1}


def test_rdma_on_one_node_and_not_on_another_is_a_problem_that_names_it() -> None:
    (problem,) = compare([node("a", **rdma(3)), node("b", **rdma(None))])
    assert problem.node == "b" and "rocep1s0f0:1 (GID 3) on a" in problem.what
    (problem,) = compare([node("a", gpus=1), node("b", **rdma(None, "InfiniBand"))])
    assert problem.node == "a" and "rocep1s0f0:1 on b" in problem.what
    # Indexes differ between machines
    assert compare([node("a", **rdma(3)), node("b", **rdma(2))]) == []
    off: dict[str, Any] = {"rdma_is_off": True}
    assert compare([node("a", **rdma(3), **off), node("b", **rdma(None), **off)]) == []
    # Gloo has no use for it
    assert compare([node("a", **(rdma(3) | {"gpus": 0})), node("b")]) == []


def test_the_check_prints_each_nodes_interface_and_rdma() -> None:
    nodes = [
        node("a", interface="eth0", **rdma(3)),
        node("b", interface="eth1", models={"org/m": "downloadable"}),
    ]
    lines = commands.network_lines(Report(nodes, [], None))
    assert lines == [
        "node a: eth0, RDMA rocep1s0f0:1 (GID 3)",
        "node b: eth1, RDMA none, org/m downloadable",
    ]


def test_the_node_whose_all_reduce_failed_first_is_the_one_that_is_named() -> None:
    def reduce(address: str) -> dict[str, Any]:
        time.sleep(0.3 if address == "a" else 0.0)
        return {"error": "no such device" if address == "b" else "timed out"}

    report = check(Nodes(reduce=reduce), "a", "b", "c")
    assert [problem.node for problem in report.problems][-1] == "a"
    assert len(report.problems) == 3


def test_nodes_that_fit_together_pass_with_the_slowest_rate() -> None:
    rates = {"a": 0.2, "b": 0.1}
    report = check(Nodes(reduce=lambda address: answer(address, rates[address])), "a", "b")
    assert report.problems == []
    assert report.reduce is not None and (report.reduce["node"], report.reduce["gb_per_s"]) == (
        "b",
        0.1,
    )
    assert [one["address"] for one in report.nodes] == ["a", "b"]


def test_a_check_that_hangs_ends_when_it_is_told_to() -> None:
    over, began = threading.Event(), time.monotonic()
    threading.Timer(0.3, over.set).start()
    report = check(
        Nodes(reduce=lambda address: time.sleep(5) or answer(address, 0.1)), "a", "b", over=over
    )
    assert (report.problems, report.reduce) == ([], None)
    assert time.monotonic() - began < 3


def test_what_is_wrong_here_is_no_fault_of_a_node() -> None:
    def reduce(address: str) -> dict[str, Any]:
        raise NibbleError(ExitCode.CONFIG, what="the certificates of RAY_TLS_* cannot be used")

    with pytest.raises(NibbleError, match="certificates") as caught:
        check(Nodes(reduce=reduce), "a", "b")
    assert caught.value.code == ExitCode.CONFIG


def asked_to_check(
    monkeypatch: pytest.MonkeyPatch, nodes: list[dict[str, Any]], *words: str, **more: Any
) -> list[str]:
    """The nodes that `nibble cluster check` checks where the head knows `nodes` and says `more`.
    It waits for 1 s.
    """
    checked: list[str] = []
    environ = {
        "HEAD_IP": "127.0.0.1",
        "NIBBLE_CLUSTER_TOKEN": "token",
        "NIBBLE_CLUSTER_WAIT_SECONDS": "1",
    }
    said: list[str] = []

    def preflight(caller: Caller, nodes: Sequence[Mapping[str, Any]], **more: Any) -> Report:
        checked.extend(one["name"] for one in nodes)
        return Report(nodes, [], None)

    monkeypatch.setattr(commands, "preflight", preflight)
    monkeypatch.setattr(commands, "BEAT_S", 0.05)
    monkeypatch.setattr(commands, "_ask", lambda caller: {"nodes": nodes, **more})
    monkeypatch.setattr(Claim, "take", lambda claim: None)
    monkeypatch.setattr(commands, "unreached", lambda *given: None)
    commands.cluster_check(read_wishes(words, environ), said.append)
    return checked


def ray(name: str, gpus: int, age_s: float = 0.0, role: str = "ray-worker") -> dict[str, Any]:
    node = {"name": name, "address": name, "role": role, "rank": None, "facts": {"target": "cpu"}}
    return node | {"gpus": gpus, "busy": 0, "age_s": age_s}


def test_the_check_leaves_out_a_head_without_gpus_and_names_a_silent_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = ray("d", 0, role="ray-head")
    assert asked_to_check(monkeypatch, [ray("b", 1), ray("c", 1), head]) == ["b", "c"]
    assert asked_to_check(monkeypatch, [ray("b", 0), head]) == ["d", "b"]
    with pytest.raises(NibbleError, match="node c has not answered for 60 s"):
        asked_to_check(monkeypatch, [ray("b", 1), ray("c", 1, age_s=60.0)])


def test_a_check_before_any_node_has_joined_is_exit_9(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NibbleError, match="no node has joined after 1 s") as caught:
        asked_to_check(monkeypatch, [])
    assert caught.value.code == ExitCode.CLUSTER


def test_a_check_of_fewer_nodes_than_expected_is_exit_9_and_names_those_that_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = ray("a", 1, role="ray-head")
    with pytest.raises(NibbleError, match=r"only a answers after 1 s; .* --nnodes") as caught:
        asked_to_check(monkeypatch, [head])
    assert caught.value.code == ExitCode.CLUSTER
    with pytest.raises(NibbleError, match="the plan needs 3 nodes, but only a, b answer after 1 s"):
        asked_to_check(monkeypatch, [head, ray("b", 1)], "--nnodes", "3")
    assert asked_to_check(monkeypatch, [head], "--nnodes", "1") == ["a"]
    with pytest.raises(NibbleError, match="the plan needs 2 GPUs, but the nodes offer 1"):
        asked_to_check(monkeypatch, [head], "nibble-demo", "--tensor-parallel-size", "2")
    rank_0 = ray("a", 0, role="serve") | {"rank": 0}
    with pytest.raises(NibbleError, match="no answer from the node with rank 1 after 1 s"):
        asked_to_check(monkeypatch, [rank_0], expects=2)


def test_a_check_waits_for_a_node_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [ray("a", 1, role="ray-head")]
    monkeypatch.setattr(commands, "time", SlowStart(nodes, ray("b", 1)))
    assert asked_to_check(monkeypatch, nodes, "--nnodes", "2") == ["a", "b"]


@dataclass
class SlowStart:
    """A clock whose first sleep brings another node."""

    nodes: list[dict[str, Any]]
    late: dict[str, Any]

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        if self.late not in self.nodes:
            self.nodes.append(self.late)


@pytest.mark.parametrize("words", [[], ["nibble-demo", "--tensor-parallel-size", "2"]])
def test_a_check_compares_memory_as_a_start_does(
    monkeypatch: pytest.MonkeyPatch, words: Sequence[str]
) -> None:
    """A node with 900 MiB cannot hold vLLM's processes, whatever the model."""
    nodes = [
        node(name, target="cpu", memory_available_bytes=mib << 20)
        | {
            "address": name,
            "role": "ray-head",
            "rank": None,
            "gpus": 1,
            "busy": 0,
            "age_s": 0.0,
        }
        for name, mib in (("a", 9000), ("b", 900))
    ]
    by_name = {one["address"]: one["facts"] for one in nodes}

    def ask(
        self: Caller, address: str, path: str, body: Mapping[str, Any], timeout_s: float = 0
    ) -> Any:
        return {"nodes": nodes} if path == "/nodes" else by_name[address] | {"models": {}}

    monkeypatch.setattr(Caller, "ask", ask)
    monkeypatch.setattr(Claim, "take", lambda claim: None)
    environ = {"HEAD_IP": "127.0.0.1", "NIBBLE_CLUSTER_TOKEN": "token"}
    report = commands.cluster_check(read_wishes(words, environ), lambda text: None)
    assert [problem.node for problem in report.problems] == ["b"]
    assert "0.879 GiB of memory are available, but" in report.problems[0].what


def test_name_servers_that_are_silent_do_not_hold_up_a_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "RESOLVE_S", 0.3)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: time.sleep(5))
    began = time.monotonic()
    with pytest.raises(NibbleError, match=r"HEAD_IP nosuchhost .*no name server answers") as caught:
        network.resolve("nosuchhost", "HEAD_IP")
    assert caught.value.code == ExitCode.CLUSTER
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    "ask",
    [
        lambda asked: commands.cluster_check(asked, lambda text: None),
        lambda asked: ray_worker(asked.settings, asked.accepted.environ),
        lambda asked: ray_head(asked.settings, asked.accepted.environ),
        lambda asked: serve_module._serve(asked, lambda: None),
    ],
    ids=["cluster check", "ray-worker", "ray-head", "serve"],
)
def test_a_head_whose_name_is_not_known_is_refused_before_anything_is_waited_for(
    ask: Callable[[Asked], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    more = {
        "HEAD_IP": "nosuchhost",
        "NIBBLE_CLUSTER_TOKEN": "token",
        "NIBBLE_CACHE_DIR": str(tmp_path),
    }
    environ = {**more, "NIBBLE_CLUSTER": "ray", "TENSOR_PARALLEL_SIZE": "2"}
    with pytest.raises(
        NibbleError, match="HEAD_IP nosuchhost is neither an IPv4 address nor a known name"
    ) as caught:
        ask(read_wishes(["nibble-demo"], environ))
    assert caught.value.code == ExitCode.CLUSTER


def test_a_model_folder_is_here_absent_or_incomplete(tmp_path: Path) -> None:
    assert model_state(str(tmp_path / "none")) == "absent"
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"w": "model-1.safetensors"}}'
    )
    assert model_state(str(tmp_path)).startswith("incomplete: ")


ON_HUB = {"model": "org/m", "revision": None}


@pytest.mark.parametrize(
    ("states", "has_ray", "more", "words"),
    [
        ({}, True, {"models": ["/m"]}, None),
        ({"b": "absent"}, False, {"models": ["/m"]}, "the model /m is absent; .*copy the model"),
        ({"a": "downloadable", "b": "downloadable"}, False, {"hub": ON_HUB}, None),
        (
            {"b": "absent, and org/m is gated"},
            False,
            {"hub": ON_HUB},
            "org/m is gated; .*nibble pull org/m",
        ),
        (
            {"a": "downloadable", "b": "downloadable"},
            True,
            {"hub": ON_HUB},
            "the model org/m is downloadable",
        ),
        ({"a": "downloadable"}, True, {"hub": ON_HUB}, None),
        ({"b": "absent"}, True, {"hub": ON_HUB, "first_gives": True}, None),
        (
            {"a": "absent"},
            True,
            {"models": ["/m"], "first_gives": True},
            "node a: the model /m is absent",
        ),
    ],
)
def test_every_node_has_the_model_or_can_download_it(
    states: Mapping[str, str], has_ray: bool, more: Mapping[str, Any], words: str | None
) -> None:
    report = check(Nodes(models=states), "a", "b", has_ray=has_ray, **more)
    if words is None:
        assert report.problems == []
    else:
        with pytest.raises(NibbleError, match=words):
            report.demand()


def test_a_model_of_the_hubs_is_here_downloadable_or_absent_and_why(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    with Hub() as hub:
        hub.add("acme/demo", folder)
        hub.add("acme/gated", folder, gated=True)
        hub.add("acme/huge", folder, huge={"model-2.safetensors": 1 << 50})
        environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path)}
        assert hub_state("acme/demo", None, environ) == "downloadable"
        assert "is a gated model" in hub_state("acme/gated", None, environ)
        assert "1048576.0 GiB do not fit in" in hub_state("acme/huge", None, environ)
        pull("acme/demo", None, environ)
    assert hub_state("acme/demo", None, environ) == "here"


def test_the_interface_is_the_one_that_has_the_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("198.51.100.7") is None
    assert is_here("127.0.0.1")
    assert not is_here("198.51.100.7")


def test_an_interface_is_found_by_any_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(address: str, family: int = socket.AF_INET) -> Any:
        return SimpleNamespace(family=family, address=address)

    addresses = {
        "eth0": [entry("10.8.0.2"), entry("10.9.0.2"), entry("fe80::1", socket.AF_INET6)],
        "eth1:service": [entry("10.7.0.9")],  # the kernel names an address with a label so
    }
    monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: addresses)
    assert interface_of("10.9.0.2") == "eth0" and interface_of("10.7.0.9") == "eth1"
    assert interface_of("fe80::1") is None


def test_the_disk_that_counts_is_that_of_the_cache_folder_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A settings file may say which; the variable need not be there."""
    file = tmp_path / "nibble.toml"
    file.write_text(f'cache_dir = "{tmp_path}/elsewhere"\n')
    asked = read_wishes(["--config", str(file)], {"HEAD_IP": "127.0.0.1", "HOME": str(tmp_path)})
    looked: list[Path] = []
    monkeypatch.setattr(facts, "free_bytes", lambda path: looked.append(path) or 9)
    place = find_place(asked.settings, asked.accepted.environ, None)
    assert place.facts()["disk_free_bytes"] == 9
    assert looked == [tmp_path / "elsewhere"]


def test_a_network_that_comes_back_as_another_interface_is_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place("10.0.0.2", None, {"NCCL_SOCKET_IFNAME": "ours"}, Path("/tmp"))
    for name in ("eth0", "eth1"):
        monkeypatch.setattr(network, "interface_of", lambda address, name=name: name)
        assert place.environ["GLOO_SOCKET_IFNAME"] == place.facts()["interface"] == name
        assert place.environ["NCCL_SOCKET_IFNAME"] == "ours"
    monkeypatch.setattr(network, "interface_of", lambda address: None)
    with pytest.raises(NibbleError, match=r"no network interface here has the address 10\.0\.0\.2"):
        place.facts()


def make_port(sys: Path, name: str, state: str, gids: dict[str, tuple[str, str]]) -> None:
    """One port of an RDMA device as the kernel shows it."""
    port = sys / "class/infiniband" / name / "ports/1"
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True)
    (port / "state").write_text(state)
    (port / "link_layer").write_text("Ethernet")
    (port / "gid_attrs/ndevs/0").write_text("enp1s0f0np0")
    for index, (gid, kind) in gids.items():
        (port / "gids" / index).write_text(gid)
        (port / "gid_attrs/types" / index).write_text(kind)


def test_roce_ports_that_are_up_have_the_gid_of_the_nodes_address(tmp_path: Path) -> None:
    mapped = "0000:0000:0000:0000:0000:ffff:0a00:0002"
    table = {"0": ("fe80::1", "IB/RoCE v1"), "2": (mapped, "IB/RoCE v1"), "3": (mapped, "RoCE v2")}
    make_port(tmp_path, "rocep1s0f0", "4: ACTIVE", table)
    make_port(tmp_path, "rocep1s0f1", "1: DOWN", table)
    found = rdma_devices("10.0.0.2", tmp_path)
    assert found == (RdmaDevice("rocep1s0f0", 1, "Ethernet", "enp1s0f0np0", 3),)
    environ = network_environ("10.0.0.2", "enp1s0f0np0", found)
    assert (environ["NCCL_IB_HCA"], environ["NCCL_IB_GID_INDEX"]) == ("rocep1s0f0:1", "3")
    assert environ["GLOO_SOCKET_IFNAME"] == environ["NCCL_SOCKET_IFNAME"] == "enp1s0f0np0"


def test_without_rdma_nccl_is_told_the_interface_only() -> None:
    assert not {"NCCL_IB_HCA", "NCCL_IB_GID_INDEX"} & set(network_environ("10.0.0.2", "eth0", ()))
