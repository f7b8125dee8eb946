"""`nibble trace`: a profile of some steps of a server by kernel, and a file for Perfetto."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from nibble.cli.common import INTERRUPTED, Json, print_json, say, split_words
from nibble.errors import ExitCode, NibbleError
from nibble.machine.out_path import create_folder

VERB = "trace"
JSON, TABLE, PERFETTO = "trace.json", "trace.txt", "perfetto.json.gz"
FLAG, DIRECTORY = "--profiler-config", "torch_profiler_dir"
_START_LIMIT_S, _FILES_LIMIT_S, _TIMEOUT_S, _END_S = 1800.0, 120.0, 600.0, 60.0
_HOW = (
    "start it with --profiler-config"
    ' \'{"profiler": "torch", "torch_profiler_dir": "/tmp/profile"}\', or use --start MODEL'
)


def trace(
    url: Annotated[
        str | None,
        typer.Argument(help="Address of a server; default: this machine's, at HOST and PORT."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps to profile.")] = 16,
    streams: Annotated[int, typer.Option(min=1, max=1024, help="Requests at the same time.")] = 1,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Tokens of each prompt.")
    ] = 32,
    start: Annotated[
        str | None, typer.Option(help="Model of a server to start for the profile.")
    ] = None,
    flags: Annotated[
        str, typer.Option(help="Flags of `nibble serve` for --start, as one word.")
    ] = "",
    profiles: Annotated[
        Path | None,
        typer.Option(help="The server's torch_profiler_dir. Default: from its plan."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=10_000, help="Kernels in the table.")] = 20,
    model: Annotated[
        str | None, typer.Option(help="Served model. Default: the server's first.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="New folder for the table, JSON and Perfetto's file.")
    ] = Path("nibble-trace"),
    as_json: Json = False,
) -> None:
    """Profile some steps of a server by kernel. It also writes a file for ui.perfetto.dev."""
    environ = dict(os.environ)
    if start and url:
        raise NibbleError(
            ExitCode.USAGE,
            what=f"--start starts a server, and {url} names one that runs",
            action="leave one of them out",
        )
    split_words(flags, "--flags")
    is_new = not out.exists()
    create_folder(out, "a profile", JSON)
    try:
        with _server(start, flags, url, environ) as (endpoint, folder):
            found = _profile(endpoint, profiles or folder, steps, streams, prompt_tokens, model,
                             out, environ)  # fmt: skip
        _publish(found, out, top, as_json)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # it has files
                out.rmdir()


def _publish(found: Any, out: Path, top: int, as_json: bool) -> None:
    from nibble.bench.trace import table

    (out / JSON).write_text(json.dumps(found.to_json(), indent=1) + "\n")
    head = ("kernel" if found.on_gpu else "operator (own time)", "runs", "ms", "share")
    rows = [head, *table(found, top)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    (out / TABLE).write_text("\n".join(lines) + "\n")
    if as_json:
        print_json(found.to_json())
        return
    print("\n".join(lines))
    print(
        f"{found.steps} steps, {found.microseconds / 1000:.1f} ms; open {out / PERFETTO} at"
        " https://ui.perfetto.dev"
    )


@contextlib.contextmanager
def _server(
    start: str | None, flags: str, url: str | None, environ: Mapping[str, str]
) -> Iterator[tuple[Any, Path | None]]:
    """(endpoint, folder of its profiles): the running server, or one while the block runs."""
    from nibble.cli.status import status_at
    from nibble.serve.endpoint import endpoint_at, local_endpoint

    if start is not None:
        with (
            tempfile.TemporaryDirectory(prefix="nibble-trace-") as scratch,
            _started(start, split_words(flags, "--flags"), Path(scratch), environ) as endpoint,
        ):
            yield endpoint, Path(scratch, "profiles")
        return
    endpoint = endpoint_at(url, environ) if url else local_endpoint(environ)
    plan = status_at(endpoint, environ).get("plan") or {}
    given = (plan.get("args") or {}).get(FLAG, {}).get("value") or {}
    with contextlib.suppress(ValueError):
        given = json.loads(given) if isinstance(given, str) else given
    found = given.get(DIRECTORY) if isinstance(given, dict) else None
    yield endpoint, Path(found) if found else None


@contextlib.contextmanager
def _started(
    model: str, flags: list[str], scratch: Path, environ: Mapping[str, str]
) -> Iterator[Any]:
    """A server of nibble on free ports. Raises ENGINE_DIED where it does not get ready."""
    from nibble.bench.stock import free_port
    from nibble.serve.endpoint import Endpoint

    port, key = free_port(), secrets.token_hex(16)
    config = {"profiler": "torch", DIRECTORY: str(scratch / "profiles"),
              "torch_profiler_with_stack": False}  # fmt: skip
    own = {"HOST": "127.0.0.1", "PORT": str(port), "NIBBLE_CONTROL_PORT": str(free_port()),
           "NIBBLE_API_KEY": key}  # fmt: skip
    log = Path(tempfile.gettempdir()) / f"nibble-trace-{os.getpid()}.log"
    words = ["serve", model, FLAG, json.dumps(config), *flags]
    say(f"a server of {model} starts; its log is {log}")
    with log.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "nibble", *words], env={**environ, **own},
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        endpoint = Endpoint("127.0.0.1", port, key)
        _wait_until_ready(child, endpoint, log)
        yield endpoint
    finally:
        child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    log.unlink(missing_ok=True)


def _wait_until_ready(child: subprocess.Popen[bytes], endpoint: Any, log: Path) -> None:
    began = time.monotonic()
    while True:
        with contextlib.suppress(OSError):
            if endpoint.call("/ready", timeout_s=5.0)[0] == 200:
                return
        if child.poll() is not None or time.monotonic() - began > _START_LIMIT_S:
            lines = log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
            raise NibbleError(
                ExitCode.ENGINE_DIED,
                what=f"the server did not start: {lines[-1].removeprefix('nibble: error: ')[:300]}",
                action=f"see {log}",
            )
        time.sleep(0.5)


def _profile(
    endpoint: Any,
    folder: Path | None,
    steps: int,
    streams: int,
    prompt_tokens: int,
    model: str | None,
    out: Path,
    environ: Mapping[str, str],
) -> Any:
    from nibble.bench.served import find_served
    from nibble.bench.trace import merge, profile, read_trace, write_merged

    served = find_served(endpoint, environ, VERB, model)
    length = prompt_tokens + steps + 2
    if length > served.max_model_len:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{length} tokens are beyond the server's context of {served.max_model_len}",
            action="ask for fewer with --steps and --prompt-tokens",
        )
    prefix = f"nibble-{secrets.token_hex(4)}"
    if folder is None:
        raise _no_profiler(endpoint)
    body = {"prompt": [7] * prompt_tokens, "max_tokens": steps + 2, "ignore_eos": True,
            "temperature": 0, "model": served.name}  # fmt: skip
    say(f"{steps} steps with {streams} stream(s)")
    try:
        _post(endpoint, "/v1/completions", {**body, "max_tokens": 2})  # compiles before the profile
        _post(endpoint, "/start_profile", {"profile_prefix": prefix, "max_iterations": steps})
        try:
            _load(endpoint, body, streams)
        finally:
            _post(endpoint, "/stop_profile", {})
    except OSError as error:
        raise endpoint.no_answer(error, environ, VERB) from None
    traces = {path.name.split(".")[0].removeprefix(f"{prefix}_"): read_trace(path)
              for path in _files(folder, prefix)}  # fmt: skip
    workers = {name: one for name, one in traces.items() if "rank" in name}
    first = workers[min(workers)]
    write_merged(merge(traces), out / PERFETTO)
    found = profile(first)
    return replace(found, steps=found.steps or steps)


def _no_profiler(endpoint: Any) -> NibbleError:
    return NibbleError(
        ExitCode.CONFIG,
        what=f"the plan of the server at {endpoint.address} names no folder for profiles",
        expected="nibble's server of this machine with torch's profiler, or --profiles FOLDER",
        action=_HOW,
    )


def _post(endpoint: Any, path: str, body: Any) -> None:
    from nibble.bench.served import reason_of

    status, answer = endpoint.call(path, body, _TIMEOUT_S)
    if status != 200:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{path} answered {status}: {reason_of(answer) or 'nothing'}",
            expected="a server with torch's profiler",
            action=_HOW,
        )


def _load(endpoint: Any, body: Mapping[str, Any], streams: int) -> None:
    """Run all requests at once; the first failure of one is raised here."""
    failures: list[BaseException] = []

    def ask(number: int) -> None:
        try:
            prompt = [7 + number % 64, *body["prompt"][1:]]  # else the prefix cache has them all
            _post(endpoint, "/v1/completions", {**body, "prompt": prompt})
        except (NibbleError, OSError) as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _files(folder: Path, prefix: str) -> list[Path]:
    """The profile's trace files, once they no longer grow: vLLM writes them in the background."""
    deadline = time.monotonic() + _FILES_LIMIT_S
    before: dict[Path, int] = {}
    while time.monotonic() < deadline:
        now = {path: path.stat().st_size for path in folder.glob(f"{prefix}_*.pt.trace.json*")}
        if any("rank" in path.name for path in now) and now == before:
            return sorted(now)
        before = now
        time.sleep(0.5)
    raise NibbleError(
        ExitCode.ENGINE_DIED,
        what=f"no profile came into {folder} in {_FILES_LIMIT_S:.0f} s",
        action="see the server's log",
    )
