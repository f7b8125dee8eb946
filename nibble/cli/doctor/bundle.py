"""`nibble doctor --bundle`: one archive for a bug report, without secrets in any file."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import platform
import subprocess
import tarfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from nibble.cli.doctor.report import Report
from nibble.cli.status import read_status
from nibble.cluster.token import TOKEN_FILE
from nibble.errors import ExitCode, NibbleError
from nibble.hub.access import hub_home
from nibble.machine.hardware import detect
from nibble.machine.paths import cache_dir
from nibble.plan.compile_cache import FOLDER
from nibble.plan.gather import plan_for, read_wishes
from nibble.serve.api_key import KEY_FILE
from nibble.serve.compile_cache import entries
from nibble.settings.redact import Redactor, known_secrets, secret_values, shown_variables

LOG_BYTES = 2 << 20  # the end of each log
COMMANDS = {
    "nvidia-smi.txt": ["nvidia-smi", "-q"],
    "nvidia-topology.txt": ["nvidia-smi", "topo", "-m"],
    "kernel-log.txt": ["dmesg", "--ctime", "--level", "err,warn"],
}
MACHINE_FILES = (
    "/proc/meminfo", "/proc/cpuinfo", "/proc/mounts", "/proc/self/limits", "/proc/self/cgroup",
    "/etc/os-release", "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/cpu.max",
    "/proc/pressure/memory",
)  # fmt: skip
COMMAND_TIMEOUT_S = 30


def open_bundle(path: Path) -> BinaryIO:
    """Create the file, readable by this user alone. Raises CONFIG where it exists or cannot be
    created.
    """
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    except OSError as error:
        what = f"{path} cannot be written ({error.strerror})"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="a new file",
            action="name another file with --bundle PATH",
        ) from None


def write_bundle(
    file: BinaryIO, report: Report, environ: Mapping[str, str], model: str | None
) -> int:
    """Write a .tar.gz into `file`; returns the number of its files. Raises NO_FIT where the disk is
    full.
    """
    try:
        return _write(file, report, environ, model)
    except OSError as error:
        what = f"the archive could not be completed ({error.strerror or error})"
        action = "remove it, then name a file on a disk with more space with --bundle PATH"
        raise NibbleError(ExitCode.NO_FIT, what=what, action=action) from None


def _write(file: BinaryIO, report: Report, environ: Mapping[str, str], model: str | None) -> int:
    processes = list(_processes())
    redactor = Redactor(_secrets(environ, [one[2] for one in processes]))
    count = 0
    with file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in _files(report, environ, model, processes):
            text = (
                content
                if isinstance(content, str)
                else json.dumps(redactor.data(content), indent=1, default=str)
            )
            _add(archive, f"nibble-report/{name}", redactor.text(text))
            count += 1
    return count


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode(errors="replace")
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
    archive.addfile(entry, io.BytesIO(data))


def _secrets(environ: Mapping[str, str], others: list[dict[str, str]]) -> set[str]:
    """Secrets of this process, of the servers that run here, of key files and of settings files."""
    values: set[str] = set()
    for each in (environ, *others):
        folders = {_cache(each), cache_dir(each)}
        own = [folder / name for folder in folders for name in (KEY_FILE, TOKEN_FILE)]
        values |= known_secrets(each, [*own, hub_home(each) / "token"])
    for config in {each.get("NIBBLE_CONFIG", "") for each in (environ, *others)} - {""}:
        with contextlib.suppress(OSError, ValueError):
            values |= set(secret_values(tomllib.loads(Path(config).read_text())))
    return values


def _cache(environ: Mapping[str, str]) -> Path:
    """nibble's cache folder; its default where the settings cannot be read."""
    try:
        return read_wishes([], environ).cache
    except NibbleError:
        return cache_dir(environ)


def _files(
    report: Report,
    environ: Mapping[str, str],
    model: str | None,
    processes: list[tuple[int, str, dict[str, str]]],
) -> Iterator[tuple[str, Any]]:
    """(name, text or plain data) of each file; unavailable ones are omitted."""
    yield "doctor.json", report.to_json()
    yield "environment.json", shown_variables(dict(sorted(environ.items())))
    yield "hardware.json", detect(environ).to_json()
    yield (
        "packages.txt",
        "\n".join(sorted(f"{d.name} {d.version}" for d in importlib.metadata.distributions())),
    )
    yield (
        "machine.txt",
        f"{platform.platform()}\n{platform.python_version()}\nuid {os.getuid()} gid {os.getgid()}",
    )
    yield "processes.txt", "\n".join(f"{pid} {command}" for pid, command, _ in processes)
    yield "cache.json", [entry.to_json() for entry in entries(_cache(environ) / FOLDER)]
    yield from _plan(environ, model)
    yield from _own_files(environ)
    for place in MACHINE_FILES:
        with contextlib.suppress(OSError):
            yield (
                f"machine/{place.strip('/').replace('/', '-')}",
                Path(place).read_text(errors="replace"),
            )
    for name, command in COMMANDS.items():
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S
            )
            yield f"machine/{name}", done.stdout + done.stderr


def _plan(environ: Mapping[str, str], model: str | None) -> Iterator[tuple[str, Any]]:
    """The plan for the model, or why there is none; and the status of a running server."""
    try:
        yield "status.json", read_status(environ)
    except NibbleError as error:
        yield "status.txt", error.line()
    if model is None:
        return
    try:
        yield "plan.json", plan_for(read_wishes([], {**environ, "MODEL": model})).to_json()
    except NibbleError as error:
        yield "plan.txt", error.line()


def _own_files(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The user's TOML, logs, last fault, failed starts, background servers; never the key."""
    cache = _cache(environ)
    with contextlib.suppress(OSError):  # written without a look at the settings
        yield "nibble/last-fault.txt", _tail(cache_dir(environ) / "last-fault.txt")
    wanted = [*sorted(cache.glob("logs/*")), *sorted(cache.glob("servers/*.json"))]
    wanted += [*sorted(cache.glob("crash-loop/*.json")), *sorted(cache.glob("start-times/*.json"))]
    for path in wanted:
        with contextlib.suppress(OSError):
            yield f"nibble/{path.relative_to(cache)}", _tail(path)
    if config := environ.get("NIBBLE_CONFIG"):
        with contextlib.suppress(OSError):
            yield "settings.toml", _tail(Path(config))


def _tail(path: Path) -> str:
    """The last LOG_BYTES in whole lines: the redactor would not recognise half a secret."""
    with path.open("rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - LOG_BYTES)
        file.seek(begin)
        data = file.read()
    whole = data.partition(b"\n")[2] if begin else data
    return whole.decode(errors="replace")


def _processes() -> Iterator[tuple[int, str, dict[str, str]]]:
    """(pid, command line, environment) of nibble's, vLLM's and Ray's processes, as far as this
    user may look.
    """
    import psutil

    for one in psutil.process_iter(["cmdline", "environ"], ad_value=None):
        command = " ".join(one.info["cmdline"] or ())
        if any(name in command.lower() for name in ("nibble", "vllm", "raylet", "gcs_server")):
            yield one.pid, command, one.info["environ"] or {}
