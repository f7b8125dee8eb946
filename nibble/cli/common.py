"""What several verbs share: their words, `--json`, and lines on stderr."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from nibble.errors import ExitCode, NibbleError
from nibble.printable import printable

# nibble.settings.command_line reads the words after these verbs: it knows nibble's options and
# vLLM's flags.
FREE_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
INTERRUPTED = 130  # exit code after Ctrl-C, as shells give
Words = Annotated[list[str] | None, typer.Argument(metavar="[MODEL] [FLAGS]")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def print_json(data: Any) -> None:
    """Print plain data on stdout."""
    print(json.dumps(data, indent=2, default=str))


def say(text: str) -> None:
    """Print a message of nibble on stderr."""
    print(f"[nibble] {printable(text)}", file=sys.stderr, flush=True)


def say_new(lines: Iterable[str], said: set[str]) -> None:
    """Print the messages that are not in `said`, and add them to it."""
    for line in lines:
        if line not in said:
            say(line)
            said.add(line)


def split_words(text: str, option: str) -> list[str]:
    """The words of an option that holds flags. Raises USAGE."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise NibbleError(
            ExitCode.USAGE,
            what=f"{option} {text!r} cannot be split into words ({error})",
            action="correct its quotes",
        ) from None


def wanted(words: Sequence[str] | None, verb: str) -> list[str]:
    """The words of a verb. For --help it prints nibble's help and exits: typer's help does not know
    vLLM's flags.
    """
    given = list(words or ())
    if "--help" in given or "-h" in given:
        from nibble.cli.help import show_verb_help

        show_verb_help(verb)
        raise typer.Exit(ExitCode.OK)
    return given
