"""Runs pip with its output in a log; a failure prints the lines that explain it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from setup.decide import SetupError

TAIL_LINES = 20
# pip prints the first for each package that an index folder does not have.
NOISE = re.compile(
    r"^WARNING: Location '.*' is ignored|^\s*$|^\[notice\]|^WARNING: Running pip as the 'root'"
    r" user|^WARNING: Target"
)
STEP = re.compile(r"^\s*(Collecting|Downloading|Processing|Using cached|Building|Installing) ")


def is_noise(line: str) -> bool:
    """Whether a user need not read this line of a successful pip run."""
    return NOISE.search(line) is not None


def clean_environment(environ: dict[str, str]) -> dict[str, str]:
    """The user's environment (proxies, certificates, pip's configuration) without variables that
    would redirect this pip.
    """
    removed = (
        *("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX"),
        *("PIP_REQUIRE_VIRTUALENV", "PIP_USER", "PIP_QUIET"),
    )
    kept = {name: value for name, value in environ.items() if name not in removed}
    added = {
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_PROGRESS_BAR": "off",
        "PIP_USER": "0",
    }
    return kept | added | {"PYTHONUNBUFFERED": "1"}


class Pip:
    """The virtual environment's pip. Its whole output goes to `log`."""

    def __init__(self, python: Path, log: Path) -> None:
        self.python = python
        self.log = log

    def run(self, args: Iterable[str], what: str) -> list[str]:
        """Run pip; its last lines. If pip fails, prints those lines and raises SetupError 6."""
        code, tail = self.attempt(args)
        if code:
            print("\n".join(f"    {line}" for line in tail), file=sys.stderr)
            raise SetupError(
                6,
                f"pip could not install {what}",
                "an installation",
                f"the whole output is in {self.log}",
            )
        return tail

    def attempt(
        self, args: Iterable[str], environ: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[int, list[str]]:
        """Run pip with `environ` added; its exit status and its last lines without noise."""
        command = [str(self.python), "-m", "pip", *args]
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        with (
            self.log.open("a") as log,
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                env=clean_environment({**os.environ, **environ}),
            ) as process,
        ):
            assert process.stdout is not None
            log.write(f"$ {' '.join(command)}\n")
            for line in process.stdout:
                if is_noise(line):
                    continue
                log.write(line)
                tail.append(line.rstrip())
                _show_step(line)
        _show_step("")
        return process.returncode, list(tail)


def _show_step(line: str) -> None:
    """On a terminal, show pip's current step on one line; an empty `line` clears it."""
    if not sys.stdout.isatty() or (line and not STEP.match(line)):
        return
    print("\r\033[K" + line.strip()[:76], end="", flush=True)
