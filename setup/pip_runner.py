"""pip without its noise: output goes to a log, a failure shows the lines that say why."""

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
# One such line per package and index where an index is a folder that does not hold every package.
NOISE = re.compile(
    r"^WARNING: Location '.*' is ignored|^\s*$|^\[notice\]|^WARNING: Running pip as the 'root'"
    r" user|^WARNING: Target"
)
STEP = re.compile(r"^\s*(Collecting|Downloading|Processing|Using cached|Building|Installing) ")


def is_noise(line: str) -> bool:
    """True for lines of a healthy pip run that a user need not read."""
    return NOISE.search(line) is not None


def clean_environment(environ: dict[str, str]) -> dict[str, str]:
    """The caller's environment (proxies, certificates, pip's own configuration), less what leads
    pip astray here.
    """
    gone = (
        "PYTHONPATH",
        "PYTHONHOME",
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_REQUIRE_VIRTUALENV",
        "PIP_USER",
        "PIP_QUIET",
    )
    kept = {name: value for name, value in environ.items() if name not in gone}
    ours = {
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_PROGRESS_BAR": "off",
        "PIP_USER": "0",
    }
    return kept | ours | {"PYTHONUNBUFFERED": "1"}


class Pip:
    """The virtual environment's pip. `log` collects everything it prints."""

    def __init__(self, python: Path, log: Path) -> None:
        self.python = python
        self.log = log

    def run(self, args: Iterable[str], what: str) -> list[str]:
        """Run pip; return its last lines. Raises SetupError 6, after showing those lines, when
        it fails.
        """
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
        """Run pip with `environ` on top; return its exit status and its last lines without the
        noise.
        """
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
    """On a terminal, keep one line that says what pip is at; an empty `line` wipes it."""
    if not sys.stdout.isatty() or (line and not STEP.match(line)):
        return
    print("\r\033[K" + line.strip()[:76], end="", flush=True)
