"""Exit codes and stops of the supervisor, with a stand-in for vLLM that misbehaves on demand.

What a real vLLM does is in tests/e2e/test_serve.py; here is what no real one does when asked to.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nibble.engine import process as engine
from nibble.engine.gate.admission import Admission
from nibble.engine.gate.state import State
from nibble.errors import ExitCode, NibbleError
from nibble.machine.memory import Memory
from nibble.machine.process_table import processes
from nibble.plan.budget import DecodeBound
from nibble.plan.memory import UNWATCHED, Limits, Step, limits
from nibble.serve import supervisor as launch
from nibble.serve import watchdog as governor
from nibble.serve.api_key import KeyDecision
from tests.support.servers.serving import free_port

NO_KEY = KeyDecision(None, "loopback", None, "loopback")

# Talks like vLLM 0.32 as far as the supervisor listens. `behave` is inserted after it serves.
STAND_IN = """
import http.client, http.server, json, os, signal, subprocess, sys, threading, time
port, control_port = map(int, sys.argv[1:])
running = [0]
class Api(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.reply()
    def do_POST(self): self.reply()
    def reply(self):
        answers = {{
            "/v1/models": json.dumps({{"data": [{{"id": "m"}}, {{"id": "default"}}]}}),
            "/metrics": f"vllm:num_requests_running{{{{}}}} {{running[0]}}.0\\n",
        }}
        text = answers.get(self.path, "{{}}")
        broken = 503 if self.path == "/health" and running[0] < 0 else 200
        self.send_response({answer} if self.path == "/v1/completions" else broken)
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *args): pass
def note(line): print(line, flush=True)
def until_ready():  # for nibble, not for ourselves: how long that takes depends on the machine's load
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", control_port, timeout=5)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200: return
        except OSError: pass
        time.sleep(0.02)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
note("(Worker pid=1) INFO 11-21 06:00:00 [x.py:1] Starting to load model m...")
{before}
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Api)
threading.Thread(target=server.serve_forever, daemon=True).start()
note("(APIServer pid=1) INFO 11-21 06:00:00 [entry.py:136] Supported tasks: ['generate']")
note("INFO:     Application startup complete.")
{behave}
time.sleep(60)
"""  # noqa: E501


class Run:
    """Runs `launch.serve` on a stand-in; `told` are nibble's lines, `code` how it ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capfd = capfd
        self.pid_seen: list[int] = []

    def __call__(
        self,
        before: str = "",
        behave: str = "",
        answer: int = 200,
        drain_s: int = 5,
        stall_s: int = 60,
        hang_s: float = 0,
        signals: tuple[tuple[float, int], ...] = (),
        when_ready: bool = True,
        limit: Limits = UNWATCHED,
    ) -> tuple[int, str]:
        program = STAND_IN.format(before=before, behave=textwrap.dedent(behave), answer=answer)
        ports = [free_port(), free_port()]
        command = [sys.executable, "-c", program, *map(str, ports)]
        self._monkeypatch.setattr(engine, "child_command", lambda argv: command)
        settings = SimpleNamespace(
            host="127.0.0.1",
            port=ports[0],
            control_port=ports[1],
            drain_seconds=drain_s,
            stall_seconds=stall_s,
            hang_seconds=hang_s,
            kernel_assertion="warn",
            canary="off",
        )
        plan: Any = SimpleNamespace(
            settings=settings,
            args={},
            served_names=("m", "default"),
            argv=lambda: ["serve", "m"],
            vllm_environ=dict,
            to_json=dict,
            target=SimpleNamespace(device="cpu"),
            bound=DecodeBound(None, None, None, ""),
            ladder=(Step("MAX_NUM_SEQS=1", 1 << 30),),
            topology=SimpleNamespace(mode="machine", ranks_here=1, ranks=1, spans_machines=False),
        )
        over = threading.Event()
        sender = threading.Thread(
            target=self._send, args=(ports[1], signals, when_ready, over), daemon=True
        )
        sender.start()
        try:
            code, end = launch.serve(plan, dict(os.environ), NO_KEY, limit), ""
        except NibbleError as error:
            if error.code not in (ExitCode.ENGINE_DIED, ExitCode.NO_FIT):
                raise
            code, end = int(error.code), error.line()
        over.set()
        sender.join(5)
        told = self._capfd.readouterr().err + end
        print(told)  # pytest shows it where a test fails
        return code, told

    def _send(
        self,
        port: int,
        signals: tuple[tuple[float, int], ...],
        when_ready: bool,
        over: threading.Event,
    ) -> None:
        """Send the signals to this process once the server is ready, and none after the run."""
        import http.client

        deadline = time.monotonic() + 20
        while signals and not over.is_set() and time.monotonic() < deadline:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
                connection.request("GET", "/ready" if when_ready else "/status")
                if connection.getresponse().status == 200:
                    break
            except OSError:
                pass
            time.sleep(0.02)
        for delay_s, signum in signals:
            if over.wait(delay_s):
                return
            os.kill(os.getpid(), signum)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capfd)


TERM = ((0.0, signal.SIGTERM),)


def test_told_to_stop_with_nothing_running_is_0(run: Run) -> None:
    code, told = run(signals=TERM)
    assert code == 0
    assert "drained and stopped" in told


def test_told_to_stop_before_a_run_has_a_handler_ends_that_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two runs of a cluster the signal has another handler."""

    class OneEvent:
        def __init__(self, plan: object, environ: object, key: object, events: Any, *rest: object):
            self.events = events

        def run(self) -> int:
            return 0 if self.events.empty() else self.events.get().signum

        def close(self) -> None:
            pass

    monkeypatch.setattr(launch, "Supervisor", OneEvent)
    nothing: Any = None
    for was_told, code in ((True, signal.SIGTERM), (False, 0)):
        watch: Any = SimpleNamespace(was_told_to_stop=lambda told=was_told: told)
        assert launch.serve(nothing, {}, nothing, watch=watch) == code


@pytest.mark.parametrize("code", [0, 1, 7])
def test_an_engine_that_ends_by_itself_is_10_whatever_its_own_code(run: Run, code: int) -> None:
    ended, told = run(behave=f"until_ready(); os._exit({code})")
    assert ended == ExitCode.ENGINE_DIED
    assert f"vLLM ended by itself in phase ready (exit code {code})" in told


def test_an_engine_that_ends_during_load_is_10_with_the_cause(run: Run) -> None:
    code, told = run(
        before=(
            "note('(EngineCore pid=9) ERROR 11-21 06:00:00 [core.py:1] ValueError: no room');"
            " os._exit(1)"
        )
    )
    assert code == 10
    assert "in phase load (exit code 1): ValueError: no room" in told


def test_a_killed_api_server_is_named(run: Run) -> None:
    code, told = run(behave="until_ready(); os.kill(os.getpid(), signal.SIGKILL)")
    assert code == 10
    assert "in phase ready (API server killed by SIGKILL)" in told


def test_a_kill_by_the_kernel_says_so_and_what_needs_less(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = itertools.count(4)
    monkeypatch.setattr(launch.MemorySource, "kernel_kills", lambda self: next(kills))
    code, told = run(behave="os.kill(os.getpid(), signal.SIGKILL)")
    assert code == 10
    assert (
        "the kernel's OOM killer acted at the same time; reduce memory, in this order:"
        " MAX_NUM_SEQS=1 (1.0 GiB less)" in told
    )


def test_requests_that_still_run_when_time_is_over_are_143(run: Run) -> None:
    began = time.monotonic()
    code, told = run(behave="running[0] = 3", drain_s=1, signals=TERM)
    assert code == 143
    assert "3 request(s) were unfinished after 1 s" in told
    assert time.monotonic() - began < 5


def test_the_signal_to_vllm_waits_until_no_request_runs(run: Run) -> None:
    behave = """
        running[0] = 1
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0 if running[0] == 0 else note(f"BROKEN {running}")))
        time.sleep(1.5); running[0] = 0
    """  # noqa: E501
    code, told = run(behave=behave, signals=TERM)
    assert code == 0
    assert "BROKEN" not in told


def test_a_drain_that_vllm_itself_cut_is_143_though_it_exits_0(run: Run) -> None:
    line = (
        "(EngineCore pid=9) INFO 11-21 06:00:00 [core.py:1644] [shutdown] EngineCore: aborting"
        " in-flight requests count=2"
    )
    behave = (
        f"signal.signal(signal.SIGTERM, lambda *_: (note({line!r}), time.sleep(0.3), os._exit(0)))"
    )
    code, told = run(behave=behave, signals=TERM)
    assert code == 143
    assert "2 request(s) unfinished" in told


def test_an_engine_that_does_not_stop_is_killed_when_vllm_gave_up(run: Run) -> None:
    lines = (
        (
            "(EngineCore pid=9) INFO 11-21 06:00:00 [core.py:1655] [shutdown] EngineCore: draining"
            " in-flight requests count=1 t"
        ),
        (
            "(APIServer pid=8) WARNING 11-21 06:00:03 [utils.py:648] [shutdown] Process manager:"
            " force killing remaining p"
        ),
    )
    behave = f"signal.signal(signal.SIGTERM, lambda *_: [note(line) for line in {lines!r}])"
    began = time.monotonic()
    assert run(behave=behave, signals=TERM)[0] == 143
    assert time.monotonic() - began < 8


def test_a_second_signal_ends_at_once_with_143(run: Run) -> None:
    began = time.monotonic()
    code, told = run(
        behave="running[0] = 1", drain_s=60, signals=((0, signal.SIGINT), (1.2, signal.SIGTERM))
    )
    assert code == 143
    assert "SIGTERM again" in told
    assert time.monotonic() - began < 8


def test_a_signal_that_comes_twice_at_once_is_one_wish(run: Run) -> None:
    # coreutils' timeout signals its child and then its own group, which is the child once more.
    behave = "running[0] = 1; time.sleep(1); running[0] = 0"
    code, told = run(
        behave=behave, drain_s=60, signals=((0, signal.SIGTERM), (0.05, signal.SIGTERM))
    )
    assert code == 0
    assert "drained and stopped" in told


def test_a_signal_during_load_is_0_also_where_vllm_ignores_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LOADING_STOP_S", 0.5)
    before = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    code, told = run(before=before, signals=((0.5, signal.SIGTERM),), when_ready=False)
    assert code == 0
    assert "no server was running" in told


def test_a_refused_first_request_is_a_failed_canary_and_leaves_no_process(run: Run) -> None:
    with pytest.raises(NibbleError, match="got status 500") as caught:
        run(answer=500)
    assert caught.value.code == ExitCode.CANARY
    assert not [one for one in processes() if one.parent == os.getpid()]


def test_our_own_fault_ends_the_child_and_is_not_swallowed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(line: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(launch.Supervisor, "_read", lambda self, line: break_down(line))
    with pytest.raises(ZeroDivisionError):
        run()
    assert not [one for one in processes() if one.parent == os.getpid()]


def test_processes_that_left_the_session_are_ended_too(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    behave = f"""
        child = subprocess.Popen(["setsid", "sh", "-c", "echo $$ > {file}; exec sleep 300"])
        while not os.path.exists({str(file)!r}) or not open({str(file)!r}).read(): time.sleep(0.05)
        time.sleep(0.5); os._exit(1)
    """
    assert run(behave=behave)[0] == 10
    pid = int(file.read_text())
    assert pid not in {one.pid for one in processes()}


@pytest.mark.parametrize("end", ["drain", "watchdog", "watchdog before any look"])
def test_shared_memory_and_sockets_of_a_killed_engine_are_removed(
    end: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_watchdog = end != "drain"
    if end == "watchdog before any look":
        monkeypatch.setattr(engine.Engine, "deaths", lambda self, over: ())
    file = tmp_path / "made"
    monkeypatch.setattr(
        launch.MemorySource,
        "read",
        lambda self: Memory(100, 10 if by_watchdog and file.exists() else 90),
    )
    behave = f"""
        from multiprocessing import resource_tracker
        from multiprocessing.shared_memory import SharedMemory
        import socket
        memory = SharedMemory(create=True, size=4096)
        tracker = f"/proc/{{resource_tracker._resource_tracker._pid}}/cmdline"
        while "resource_tracker" not in open(tracker).read(): time.sleep(0.01)  # only forked
        meeting = socket.socket(socket.AF_UNIX)
        meeting.bind(os.environ["VLLM_RPC_BASE_PATH"] + "/" + "u" * 36)
        running[0] = 1
        open({str(file)!r} + ".part", "w").write(memory.name + " " + meeting.getsockname())
        os.rename({str(file)!r} + ".part", {str(file)!r})
    """
    code = run(behave=behave, drain_s=1, signals=() if by_watchdog else TERM, limit=limits(80))[0]
    assert code == (7 if by_watchdog else 143)
    name, path = file.read_text().split()
    assert not (Path("/dev/shm") / name).exists() and not Path(path).exists()


def test_a_silent_engine_is_reported_once_a_period_and_not_killed(run: Run) -> None:
    code, told = run(before="time.sleep(3.5)", stall_s=1, signals=TERM)
    assert code == 0
    reports = re.findall(
        r"(\w+: no progress for \d+ s); meanwhile the engine used \d+ s of CPU time", told
    )
    assert reports and len(reports) == len(set(reports)), told


def test_a_control_port_in_use_starts_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **_: started.append(args))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(sys.modules[__name__], "free_port", lambda: taken.getsockname()[1])
        with pytest.raises(NibbleError, match="NIBBLE_CONTROL_PORT") as caught:
            run()
    assert caught.value.code == ExitCode.CONFIG
    assert started == []


def test_the_signal_handlers_of_the_caller_come_back(run: Run) -> None:
    before: list[Callable[..., Any] | int | None] = [
        signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)
    ]
    run(signals=TERM)
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_folder_called_nibble_where_the_server_starts_does_not_hide_the_package(
    tmp_path: Path,
) -> None:
    (tmp_path / "nibble" / "engine").mkdir(parents=True)
    environ = engine.child_environ(dict(os.environ), Path("/tmp/gate"), "token", None)
    words = [sys.executable, "-c", "import nibble.engine.contract"]
    subprocess.run(words, check=True, env=environ, cwd=tmp_path)


def test_the_key_reaches_the_gate_through_the_environment_only() -> None:
    environ = engine.child_environ({"PATH": "/bin"}, Path("/tmp/gate"), "token", "nbl-secret")
    assert environ["NIBBLE_API_KEY"] == "nbl-secret"
    assert environ["NIBBLE_GATE_STATE"] == "/tmp/gate"
    assert not [word for word in engine.child_command(["serve", "m"]) if "secret" in word]
    assert "NIBBLE_API_KEY" not in engine.child_environ({}, Path("/tmp/gate"), "token", None)


def test_memory_below_the_limit_stops_the_engine_at_once_with_7_and_leaves_no_process(
    run: Run,
) -> None:
    began = time.monotonic()
    code, told = run(before="time.sleep(30)", limit=limits(1 << 60))
    assert code == 7
    assert time.monotonic() - began < 10
    assert re.search(
        r"stopped the engine in phase (start|load): .* of memory are available .*;"
        r" reduce memory, in this order:"
        r" MAX_NUM_SEQS=1",
        told,
    )
    assert not [one for one in processes() if one.parent == os.getpid()]


def test_a_server_that_becomes_ready_with_little_memory_is_paused_until_there_is_more(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused_at: list[float] = []
    change = launch.Admission.change

    def changed(self: Admission, old: State, new: State, phase: str) -> bool:
        done = change(self, old, new, phase)
        if done and new == "paused":
            paused_at.append(time.monotonic())
        return done

    def read(self: object) -> Memory:
        return Memory(100, 90 if paused_at and time.monotonic() - paused_at[0] > 1 else 30)

    monkeypatch.setattr(launch.Admission, "change", changed)
    monkeypatch.setattr(launch.MemorySource, "read", read)
    monkeypatch.setattr(governor, "RESUME_AFTER_S", 0.5)
    code, told = run(signals=((3.0, signal.SIGTERM),), limit=limits(80))
    assert code == 0
    lines = [line for line in told.splitlines() if "available" in line]
    assert "new requests get 503 until" in lines[0] and "admitted again" in lines[1]
    assert told.index("ready in") < told.index("new requests get 503")


def test_a_lost_process_of_vllms_that_leaves_the_rest_hanging_ends_it_with_10(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "ENGINE_END_S", 1.0)
    behave = """
        running[0] = {in_flight}
        worker = subprocess.Popen(["VLLM::Worker", "300"], executable="/bin/sleep")
        time.sleep(3); worker.kill(); time.sleep(60)
    """
    code, told = run(behave=behave.format(in_flight=-1))
    assert code == 10
    assert re.search(r"it still ran 1 s later\); VLLM::Worker \(pid \d+\) ended first", told)
    code, told = run(behave=behave.format(in_flight=0), signals=((6.0, signal.SIGTERM),))
    assert code == 0  # vLLM says that it is healthy without it
    behave = behave.replace("time.sleep(60)", "time.sleep(4); os._exit(3)")
    code, told = run(behave=behave.format(in_flight=0))
    assert code == 10 and "VLLM::Worker" not in told  # what it survived is not the cause


def test_a_process_that_ends_between_the_look_and_the_watch_is_lost_too(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pidfd_open(pid: int, flags: int = 0) -> int:
        os.kill(pid, signal.SIGKILL)
        raise ProcessLookupError

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    monkeypatch.setattr(launch, "ENGINE_END_S", 0.5)
    behave = 'running[0] = -1; subprocess.Popen(["VLLM::Worker", "300"], executable="/bin/sleep")'
    code, told = run(behave=behave)
    assert code == 10
    assert re.search(r"VLLM::Worker \(pid \d+\) ended first", told)


def test_a_signal_that_comes_just_before_a_wait_is_seen_within_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    events: list[engine.Event | None] = [None, None, engine.Stop(signal.SIGTERM)]
    supervisor = object.__new__(launch.Supervisor)
    monkeypatch.setattr(
        supervisor, "_next", lambda timeout_s: waits.append(timeout_s) or events.pop(0)
    )
    monkeypatch.setattr(supervisor, "_drain", lambda event: ExitCode.OK)
    assert supervisor._until_told() is ExitCode.OK
    assert len(waits) == 3 and max(waits) <= 1.0


def test_a_stopped_engine_ends_with_10_and_why_and_nothing_is_let_in(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    change = launch.Admission.change

    def changed(self: Admission, old: State, new: State, phase: str) -> bool:
        done = change(self, old, new, phase)
        reasons.extend([phase] if done and new == "paused" else [])
        return done

    monkeypatch.setattr(launch.Admission, "change", changed)
    behave = """
        engine = subprocess.Popen(["VLLM::EngineCore", "300"], executable="/bin/sleep")
        until_ready(); os.kill(engine.pid, signal.SIGSTOP)
    """
    began = time.monotonic()
    code, told = run(behave=behave, hang_s=1)
    assert code == 10
    assert time.monotonic() - began < 25
    assert re.search(
        r"vLLM hangs in phase ready: VLLM::EngineCore \(pid \d+\) is stopped \(state T\) for \d+ s",
        told,
    )
    assert re.search(r"\[nibble\] VLLM::EngineCore \(pid \d+\): State: ", told)
    assert reasons and "is stopped (state T)" in reasons[0]
    assert not [one for one in processes() if one.parent == os.getpid()]


def test_a_client_that_does_not_read_is_named_at_the_drains_limit(run: Run) -> None:
    behave = """
        import socket
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # vLLM waits for its connections
        Api.do_PUT = lambda self: self.wfile.write(b"x" * (64 << 20))
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(b"PUT / HTTP/1.0\\r\\n\\r\\n")
    """
    began = time.monotonic()
    code, told = run(behave=behave, drain_s=3, signals=((1.0, signal.SIGTERM),))
    assert code == 143
    assert time.monotonic() - began < 15
    assert re.search(
        r"clients have not read their answers: 127\.0\.0\.1:\d+ \(for \d s, \d+ bytes wait\)", told
    )


def test_the_control_port_answers_until_nothing_of_vllm_is_left(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    for owner, name in ((launch.Engine, "kill"), (launch.ControlServer, "close")):
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda self, o=original, n=name: (order.append(n), o(self))[1]
        )
    run(signals=TERM)
    assert order == ["kill", "close"]
