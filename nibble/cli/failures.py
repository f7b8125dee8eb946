"""Turns every failure of a verb into one line on stderr and its exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from nibble.cli.common import INTERRUPTED
from nibble.errors import ExitCode, NibbleError


def guarded(run: Callable[[], Any]) -> int:
    try:
        return int(run() or 0)
    except NibbleError as error:
        print(f"nibble: error: {error.line()}", file=sys.stderr)
        return int(error.code)
    except typer.Exit as done:
        return int(done.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # `nibble plan | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.OK)
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> int:
    """Report a usage error of typer or a defect of nibble; a traceback only on request."""
    message = getattr(error, "format_message", None)
    if message is not None:
        is_help = type(error).__name__ == "NoArgsIsHelpError"  # a group of commands alone
        line = f"nibble: error: {message().rstrip('.')}; see `{_help_of(error)}`"
        print(message() if is_help else line, file=sys.stderr)
        return int(ExitCode.USAGE)
    if os.environ.get("NIBBLE_DEBUG", "") not in ("", "0"):
        raise error
    detail = f"{type(error).__name__}: {error}".splitlines()[0]
    written = _write_traceback(error)
    where = (
        f"with the traceback in {written}"
        if written
        else "with NIBBLE_DEBUG=1 nibble shows the traceback"
    )
    print(f"nibble: error: internal fault: {detail}; please report it, {where}", file=sys.stderr)
    return int(ExitCode.INTERNAL)


def _help_of(error: Exception) -> str:
    """The command that shows the help of the verb that was misused."""
    words: list[str] = []
    context = getattr(error, "ctx", None)
    while context is not None and context.parent is not None:
        words.insert(0, context.info_name)
        context = context.parent
    return " ".join(["nibble", *words, "--help"])


def _write_traceback(error: Exception) -> Path | None:
    """Write the traceback to a file for this user alone: in nibble's cache, else in the temporary
    folder. None where neither can be written.
    """
    import tempfile
    import traceback

    from nibble.machine.paths import cache_dir

    text = "".join(traceback.format_exception(error))
    for folder in (cache_dir, lambda: Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError, NibbleError):
            folder().mkdir(parents=True, exist_ok=True)
            path = folder() / "last-fault.txt"
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
            return path
    return None
