"""Flags, environment, tokens and error lines of a Ray node; the texts below are from real runs
of ray 2.60.0.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nibble.cluster import ray_command, ray_node, ray_process
from nibble.cluster.member import End
from nibble.cluster.network import find_interface, node_address
from nibble.cluster.node import Place, find_place
from nibble.cluster.ray_failure import explain_failure
from nibble.cluster.ray_process import RayProcess
from nibble.cluster.ray_workers import RayWorkers
from nibble.cluster.roster import STOPPING, Roster
from nibble.cluster.token import TOKEN_FILE, head_token, members_token
from nibble.errors import ExitCode, NibbleError
from nibble.machine.hardware import Gpu, detect
from nibble.machine.memory import MemorySource, memory_now
from nibble.machine.paths import root
from nibble.plan.cluster_ports import AGENT_PORT, CHECK_PORT, MASTER_PORT, PORT_VARIABLES
from nibble.plan.memory import UNWATCHED
from nibble.settings.options import Settings
from nibble.settings.sources import load_settings
from tests.support.memory_files import machine
from tests.support.servers.serving import free_port

HEAD = "192.0.2.2:6379"
# `ray start --address=… --block` with another token, shortened.
WRONG_TOKEN = """\
2026-11-21 05:53:20,100 INFO scripts.py:1231 -- Local node IP: 127.0.0.3
Traceback (most recent call last):
  File "ray/_private/node.py", line 300, in __init__
ray.exceptions.AuthenticationError: InvalidAuthToken: Authentication token mismatch. The provided token does not match.
""".splitlines()  # noqa: E501
# A second `ray start --head` on the same machine, shortened.
TWO_HEADS = """\
Traceback (most recent call last):
  File "ray/scripts/scripts.py", line 1060, in start
ConnectionError: Ray is trying to start at 192.0.2.2:6379, but is already running at 192.0.2.2:6379.
""".splitlines()


def settings(**environ: str) -> Settings:
    return load_settings({}, environ).settings


def test_every_port_is_named_and_none_twice() -> None:
    flags = ray_command.head_flags("192.0.2.2", 1)
    ports = [int(flag.split("=")[1]) for flag in flags if "port=" in flag]
    ports += [*PORT_VARIABLES.values(), AGENT_PORT, MASTER_PORT, CHECK_PORT]
    assert len(ports) == len(set(ports)) == 14
    assert not 20000 <= min(ports) <= 20999


def test_a_head_has_no_dashboard_sends_no_statistics_and_stays_in_the_foreground() -> None:
    flags = ray_command.head_flags("192.0.2.2", None)
    assert {"--head", "--include-dashboard=false", "--disable-usage-stats", "--block"} <= set(flags)
    assert not [flag for flag in flags if flag.startswith("--num-gpus")]


def test_a_worker_joins_the_head_with_its_own_address_and_gpus() -> None:
    flags = ray_command.worker_flags(HEAD, "192.0.2.3", 2)
    assert {f"--address={HEAD}", "--node-ip-address=192.0.2.3", "--num-gpus=2", "--block"} <= set(
        flags
    )


def test_every_node_asks_for_the_token_and_the_key_of_the_api_stays_here() -> None:
    given = {
        "NIBBLE_API_KEY": "k",
        "VLLM_API_KEY": "k",
        "HF_TOKEN": "k",
        "RAY_AUTH_TOKEN_FILE": "/f",
        "PATH": "/bin",
        "HF_HOME": "/h",
    }
    environ = ray_command.node_environ(
        Place("192.0.2.3", "eth0", given, Path("/tmp")), "token", Path("/tmp/proof")
    )
    assert (environ["RAY_AUTH_MODE"], environ["RAY_AUTH_TOKEN"]) == ("token", "token")
    assert environ["VLLM_HOST_IP"] == "192.0.2.3"
    assert (environ["HF_HOME"], environ["NIBBLE_PROOF"]) == ("/h", "/tmp/proof")
    assert not {"NIBBLE_API_KEY", "VLLM_API_KEY", "HF_TOKEN", "RAY_AUTH_TOKEN_FILE"} & set(environ)


def test_memory_is_watched_by_nibble_and_not_by_ray_too_unless_the_user_says_so() -> None:
    for given, milliseconds in (({}, "0"), ({"RAY_memory_monitor_refresh_ms": "250"}, "250")):
        place = Place("192.0.2.3", "eth0", given, Path("/tmp"))
        environ = ray_command.node_environ(place, "token", Path("/tmp/proof"))
        assert environ["RAY_memory_monitor_refresh_ms"] == milliseconds


def test_no_secret_is_in_the_command_line() -> None:
    words = ray_command.ray_command(ray_command.worker_flags(HEAD, "192.0.2.3", 2))
    assert not [word for word in words if "token" in word.lower()]


def test_a_token_is_made_once_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "ray_auth_token"
    token = head_token(path)
    assert len(token) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert head_token(path) == token


def test_a_worker_takes_the_given_token_or_the_copied_file(tmp_path: Path) -> None:
    environ = {"NIBBLE_CACHE_DIR": str(tmp_path)}
    assert members_token(settings(RAY_AUTH_TOKEN="given"), environ, "it") == "given"
    assert members_token(settings(NIBBLE_CLUSTER_TOKEN="given"), environ, "it") == "given"
    (tmp_path / TOKEN_FILE).write_text("copied\n")
    assert members_token(settings(), environ, "it") == "copied"


@pytest.mark.parametrize("content", [b"", b"two words", b"two\nlines", b"\xff\xfe", b"nul\x00"])
def test_a_file_without_a_token_is_one_error_that_does_not_show_it(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / TOKEN_FILE).write_bytes(content)
    with pytest.raises(NibbleError, match="does not hold a token") as caught:
        members_token(settings(), {"NIBBLE_CACHE_DIR": str(tmp_path)}, "it")
    assert caught.value.code == ExitCode.CONFIG
    assert "two" not in str(caught.value)


def test_a_given_token_that_could_not_be_sent_is_a_usage_error() -> None:
    with pytest.raises(NibbleError, match="RAY_AUTH_TOKEN is not usable") as caught:
        settings(RAY_AUTH_TOKEN="hush\nhush")
    assert caught.value.code == ExitCode.USAGE
    assert "hush" not in str(caught.value)


def test_a_ray_that_never_starts_is_ended_and_exit_9(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_process, "START_S", 0.3)
    monkeypatch.setattr(ray_process, "WATCH_S", 0.1)
    began = time.monotonic()
    with pytest.raises(NibbleError, match="Ray has not started within") as caught:
        RayProcess(["sleep", "60"], {"PATH": "/usr/bin:/bin"}, "worker", HEAD, []).run()
    assert caught.value.code == ExitCode.CLUSTER
    assert time.monotonic() - began < 10


def test_memory_that_runs_out_on_its_machine_ends_it_with_7_and_all_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, available_mib=300)
    monkeypatch.setattr(ray_process, "MemorySource", lambda: MemorySource(root))
    monkeypatch.setattr(ray_process, "WATCH_S", 0.1)
    pid = tmp_path / "pid"
    program = ["sh", "-c", f"sleep 60 & echo $! > {pid}; wait"]
    limit = ray_node.memory_limits(settings(NIBBLE_MEMORY_RESERVE_GIB="1"), {})
    threading.Timer(1.0, lambda: machine(root, available_mib=200)).start()
    node = RayProcess(program, {"PATH": "/usr/bin:/bin"}, "worker", HEAD, [], limit=limit)
    with pytest.raises(
        NibbleError, match=r"on this node: 0\.195 GiB of memory are available"
    ) as caught:
        node.run()
    assert caught.value.code == ExitCode.NO_FIT
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_a_nodes_reserve_is_that_of_its_hardware_or_what_was_asked_for() -> None:
    assert ray_node.memory_limits(settings(NIBBLE_MEMORY_RESERVE_GIB="0"), {}) == UNWATCHED
    found = ray_node.memory_limits(settings(NIBBLE_TARGET="gb10"), {})
    assert found.reserve_bytes == min(8 << 30, memory_now().total_bytes // 8)


def test_a_worker_without_a_token_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(NibbleError, match="token") as caught:
        ray_node.ray_worker(settings(HEAD_IP="127.0.0.1"), {"NIBBLE_CACHE_DIR": str(tmp_path)})
    assert caught.value.code == ExitCode.USAGE


def test_a_worker_without_a_head_is_a_usage_error() -> None:
    with pytest.raises(NibbleError, match="HEAD_IP") as caught:
        ray_node.ray_worker(settings(RAY_AUTH_TOKEN="given"), {})
    assert caught.value.code == ExitCode.USAGE


def test_a_node_does_not_offer_more_gpus_than_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would believe it, and vLLM's ranks look for GPUs that are not there."""
    here = replace(detect({}), gpus=(Gpu(0, "H200", (9, 0), 1 << 30, 1 << 30, "GPU-0"),) * 2)
    monkeypatch.setattr(ray_node, "detect", lambda environ: here)
    with pytest.raises(NibbleError, match="NUM_GPUS is 3, but this machine has 2 GPUs") as caught:
        ray_node._gpus(settings(NUM_GPUS="3"), {})
    assert caught.value.code == ExitCode.CONFIG
    assert [ray_node._gpus(settings(**one), {}) for one in ({"NUM_GPUS": "1"}, {})] == [1, 2]


def test_a_worker_whose_head_does_not_answer_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_node, "GCS_PORT", free_port())
    with pytest.raises(NibbleError, match=r"no Ray head answers at 127\.0\.0\.1") as caught:
        ray_node.ray_worker(settings(HEAD_IP="127.0.0.1", RAY_AUTH_TOKEN="given"), {})
    assert caught.value.code == ExitCode.CLUSTER


def test_the_address_is_what_was_given_else_the_route_to_the_head() -> None:
    assert node_address(settings(WORKER_IP="192.0.2.9", HEAD_IP="192.0.2.2"), None) == "192.0.2.9"
    assert node_address(settings(HEAD_IP="192.0.2.2"), None) == "192.0.2.2"
    assert node_address(settings(HEAD_IP="127.0.0.1"), "127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("name", ["nosuch.invalid", "10..0.1", "::1"])
def test_a_name_that_leads_nowhere_is_what_is_blamed(name: str) -> None:
    for given, head in ((settings(HEAD_IP=name), name), (settings(HEAD_IP=name), None)):
        with pytest.raises(
            NibbleError, match=f"{name} is neither an IPv4 address .* correct HEAD_IP"
        ) as caught:
            node_address(given, head)
        assert caught.value.code == ExitCode.CLUSTER
    with pytest.raises(
        NibbleError, match=f"WORKER_IP {name} is neither an IPv4 address .* correct WORKER_IP"
    ):
        node_address(settings(WORKER_IP=name), "127.0.0.1")


def test_an_interface_that_was_asked_for_gives_the_address_where_none_was(tmp_path: Path) -> None:
    """Not that of the route: what vLLM tells others of itself and where Gloo and NCCL listen
    have to be one place.
    """
    lo = {"NIBBLE_CLUSTER_INTERFACE": "lo"}
    assert node_address(settings(**lo), None) == "127.0.0.1"
    assert node_address(settings(**lo, HEAD_IP="192.0.2.2"), "192.0.2.2") == "127.0.0.1"
    assert node_address(settings(**lo, HEAD_IP="192.0.2.2"), None) == "192.0.2.2"
    assert node_address(settings(**lo, WORKER_IP="192.0.2.9"), "192.0.2.2") == "192.0.2.9"
    with pytest.raises(NibbleError, match="no network interface nosuch0"):
        find_place(
            settings(NIBBLE_CLUSTER_INTERFACE="nosuch0", HEAD_IP="127.0.0.1"), {}, "127.0.0.1"
        )


def test_a_head_ip_may_be_a_name_on_the_head_too() -> None:
    """Its agent, its interface and the others' table of nodes need the address."""
    assert node_address(settings(HEAD_IP="localhost"), None) == "127.0.0.1"
    assert node_address(settings(WORKER_IP="localhost"), "10.0.0.1") == "127.0.0.1"


def test_an_interface_that_is_not_here_is_refused_by_name() -> None:
    assert find_interface("lo", "127.0.0.1") == "lo"
    with pytest.raises(
        NibbleError, match=r"no network interface nosuch0; expected one of .*lo"
    ) as caught:
        find_interface("nosuch0", "127.0.0.1")
    assert caught.value.code == ExitCode.CLUSTER


def test_a_head_whose_address_is_another_machines_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(NibbleError, match="is not an address of this machine") as caught:
        ray_node.ray_head(settings(HEAD_IP="198.51.100.7"), {"NIBBLE_CACHE_DIR": str(tmp_path)})
    assert caught.value.code == ExitCode.CLUSTER


@pytest.mark.parametrize(
    ("lines", "role", "words"),
    [
        (WRONG_TOKEN, "worker", "refused this node's token"),
        (TWO_HEADS, "head", "another program uses one"),
        (
            ["RuntimeError: Failed to connect to GCS. Timed out."],
            "worker",
            "no Ray head answers at 192.0.2.2:6379",
        ),
        (
            ["noise", "ValueError: --num-gpus must not be negative", "more"],
            "head",
            "ValueError: --num-gpus",
        ),
        ([], "head", "Ray did not start: no message"),
    ],
)
def test_rays_tracebacks_become_one_line_with_exit_9(
    lines: list[str], role: str, words: str
) -> None:
    error = explain_failure(lines, role, HEAD)
    assert error.code == ExitCode.CLUSTER
    assert words in error.line()
    assert "Traceback" not in error.line()


def test_a_ray_without_its_agents_packages_is_told_before_it_starts(tmp_path: Path) -> None:
    """It would start, and the preflight find the agents' ports closed."""
    pytest.importorskip("ray")
    (tmp_path / "opencensus.py").write_text("raise ImportError('no opencensus here')")
    command = [sys.executable, "-m", "nibble.cluster.ray_start", "start", "--head"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root())])}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    error = explain_failure(done.stderr.splitlines(), "head", HEAD)
    assert "no opencensus here" in error.line() and "install ray[default]" in error.line()


class Servers:
    """A head's node with a child that sleeps, in a thread, and its roster."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.roster, self.codes = Roster("head"), []
        monkeypatch.setattr(ray_process, "stop_signals", lambda tell: contextlib.nullcontext())
        program = ["sh", "-c", "echo Ray runtime started.; exec sleep 60"]
        environ = {"PATH": "/usr/bin:/bin"}
        self.node = RayProcess(program, environ, "worker", HEAD, [], roster=self.roster)
        self.thread = threading.Thread(
            target=lambda: self.codes.append(self.node.run()), daemon=True
        )

    def ended_after_s(self) -> float:
        began = time.monotonic()
        self.thread.join(30)
        assert self.codes == [ExitCode.OK]
        return time.monotonic() - began


def test_a_head_that_is_told_to_stop_lets_the_server_drain_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = Servers(monkeypatch)
    servers.roster.note_server("a", 60.0)
    monkeypatch.setattr("nibble.cluster.roster.SERVER_S", 60.0)
    servers.thread.start()
    servers.node._events.put("SIGTERM")
    deadline = time.monotonic() + 10
    while servers.roster.state != STOPPING:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(1)
    assert servers.thread.is_alive()
    servers.roster.forget_server("a")
    assert servers.ended_after_s() < 10


def test_a_second_signal_and_a_server_that_does_not_end_do_not_hold_up_a_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nibble.cluster.roster.SERVER_S", 60.0)
    for limit_s, signals in ((60.0, ["SIGTERM", "SIGTERM"]), (1.0, ["SIGTERM"])):
        servers = Servers(monkeypatch)
        servers.roster.note_server("a", limit_s)
        servers.thread.start()
        for one in signals:
            servers.node._events.put(one)
        assert servers.ended_after_s() < 20


def test_a_worker_process_that_ends_on_a_ray_node_is_told_with_its_rank(tmp_path: Path) -> None:
    program = tmp_path / "ray::RayWorkerProc"  # the kernel keeps 15 bytes of a name
    shutil.copy("/bin/sleep", program)
    worker = subprocess.Popen([program, "60"], start_new_session=True)
    (tmp_path / f"worker-{worker.pid}.json").write_text('{"rank": 1}')
    told: list[End] = []
    member: Any = SimpleNamespace(tell_end=told.append)
    governor: Any = SimpleNamespace(kernel_has_killed=lambda: False)
    over = threading.Event()
    workers = RayWorkers(member, tmp_path)
    thread = threading.Thread(target=lambda: workers.watch(worker.pid, governor, over), daemon=True)
    thread.start()
    time.sleep(2.5)  # a process counts from the second look on
    worker.kill()
    worker.wait()
    deadline = time.monotonic() + 10
    while not told and time.monotonic() < deadline:
        time.sleep(0.02)
    over.set()
    thread.join(5)
    (end,) = told
    assert (end.run, end.pid) == (0, worker.pid)
    assert end.why.startswith(f"rank 1 of the model (pid {worker.pid}) ended by itself")
