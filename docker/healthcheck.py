"""HEALTHCHECK of every image: exit 0 if the container does what it was started for, else 1.

With the argument `live` it only checks that nibble itself runs. A probe that kills the container
needs that: a server that loads, drains or is short of memory is not ready, but must not be killed.

Standard library only. One image serves, runs Ray nodes and opens shells, so the check depends on
the mode, read from the command line of process 1. `serve` is healthy while the control port reports
ready, a Ray node while Ray runs, everything else while it lives.
"""

from __future__ import annotations

import http.client
import os
import sys
import tomllib
from pathlib import Path

START_SCRIPT = "/opt/nibble/docker/start.sh"
TIMEOUT_SECONDS = 4.0


def mode_of(command_line: list[str]) -> str:
    """The mode in entrypoint.sh's arguments: without an argument, or with a flag first, `serve`."""
    if START_SCRIPT not in command_line:
        # Process 1 is not tini (`docker run --entrypoint`, a shared process namespace), so the mode
        # is unknown.
        return "serve"
    arguments = command_line[command_line.index(START_SCRIPT) + 1 :]
    return arguments[0] if arguments and not arguments[0].startswith("-") else "serve"


def answers(port: int, path: str) -> tuple[bool, str]:
    """Whether the control port answers `path` with 200, and a line that says so. /ready is 200 only
    when ready, /status from start to end.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        shown = response.read(200).decode(errors="replace").strip() if path == "/ready" else ""
        return response.status == 200, f"{path} {response.status} {shown}".strip()
    except (OSError, http.client.HTTPException) as error:
        # Refused, hung, or another program's port.
        return False, f"control port {port}: {error or type(error).__name__}"
    finally:
        connection.close()


def processes_run(*names: str) -> tuple[bool, str]:
    """Whether a process of every one of these program names exists."""
    missing = set(names)
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            program = entry.read_bytes().split(b"\0", 1)[0].decode(errors="replace")
        except OSError:  # the process ended meanwhile
            continue
        missing.discard(program.rsplit("/", 1)[-1])
    return not missing, f"not running: {', '.join(sorted(missing))}" if missing else "Ray runs"


def control_port(arguments: list[str]) -> int:
    """The control port as nibble reads it: from the command line, else NIBBLE_CONTROL_PORT, else
    the user's TOML file.
    """
    if port := given(arguments, "--control-port") or os.environ.get("NIBBLE_CONTROL_PORT"):
        return int(port)
    config = given(arguments, "--config") or os.environ.get("NIBBLE_CONFIG")
    return (
        int(tomllib.loads(Path(config).read_text()).get("control_port", 8001)) if config else 8001
    )


def given(arguments: list[str], flag: str) -> str | None:
    """The value of a flag on a command line."""
    for position, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == flag:
            return value or arguments[position + 1]
    return None


def check(only_live: bool) -> tuple[bool, str]:
    """Whether the container is healthy, and a line that says why."""
    command_line = Path("/proc/1/cmdline").read_bytes().decode(errors="replace").split("\0")
    mode = mode_of([part for part in command_line if part])
    if mode == "serve":
        try:
            port = control_port(command_line)
        except (OSError, ValueError) as error:
            return False, f"the control port is not known: {error}"
        return answers(port, "/status" if only_live else "/ready")
    if mode == "ray-head":
        return processes_run("gcs_server", "raylet")
    if mode == "ray-worker":
        return processes_run("raylet")
    return True, f"{mode} runs"


if __name__ == "__main__":
    healthy, line = check("live" in sys.argv[1:])
    print(line)
    sys.exit(0 if healthy else 1)
