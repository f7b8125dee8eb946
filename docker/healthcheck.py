"""HEALTHCHECK of every image: exit 0 when the container does what it was started for, else 1.

With the argument `live` it only asks whether nibble itself runs, for a probe whose failure kills: a
server that loads, drains or is short of memory is not ready and must not be killed for it.

Standard library only. It follows the mode, read from the command line of process 1, for one image
serves, runs Ray nodes and opens shells: `serve` is healthy when the control port says ready, a Ray
node while Ray runs, anything else while it lives.
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
    """The mode that entrypoint.sh got: no argument or a flag first means `serve`."""
    if START_SCRIPT not in command_line:
        # Without tini as process 1 (`docker run --entrypoint`, a shared process namespace) we
        # cannot know.
        return "serve"
    arguments = command_line[command_line.index(START_SCRIPT) + 1 :]
    return arguments[0] if arguments and not arguments[0].startswith("-") else "serve"


def answers(port: int, path: str) -> tuple[bool, str]:
    """Whether the control port answers `path` with 200: /ready, or /status from the first second
    to the last.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        shown = response.read(200).decode(errors="replace").strip() if path == "/ready" else ""
        return response.status == 200, f"{path} {response.status} {shown}".strip()
    except (OSError, http.client.HTTPException) as error:  # refused, hung, or something else's port
        return False, f"control port {port}: {error or type(error).__name__}"
    finally:
        connection.close()


def processes_run(*names: str) -> tuple[bool, str]:
    """Whether a process of each of these program names exists."""
    missing = set(names)
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            program = entry.read_bytes().split(b"\0", 1)[0].decode(errors="replace")
        except OSError:  # the process ended meanwhile
            continue
        missing.discard(program.rsplit("/", 1)[-1])
    return not missing, f"not running: {', '.join(sorted(missing))}" if missing else "Ray runs"


def control_port(arguments: list[str]) -> int:
    """From the command line, else NIBBLE_CONTROL_PORT, else the user's TOML file, as nibble
    itself has it.
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
