"""Secrets from variables or files: every secret X may come as X_FILE."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nibble.errors import ExitCode, NibbleError
from nibble.machine.disk import secret_fix

MAX_SECRET_BYTES = 64 * 1024  # a mistaken path to a big file must not be read into memory


def read_secret(name: str, environ: Mapping[str, str]) -> str | None:
    """The value of secret `name` from `environ`, or from the file that `name`_FILE names.

    Line breaks around it are dropped: files end with one, and a Kubernetes Secret made from a file
    keeps it. Raises CONFIG when both are set or the file cannot be read.
    """
    value, path = environ.get(name, "").strip("\r\n") or None, environ.get(f"{name}_FILE") or None
    if path is None:
        return value
    if value is not None:
        what = f"{name} and {name}_FILE are both set"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="one of them",
            action=f"unset {name} or {name}_FILE",
        )
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_SECRET_BYTES + 1)
        text = data.decode()
    except OSError as error:
        what = f"the secret file {path} of {name}_FILE cannot be read ({error.strerror})"
        raise NibbleError(ExitCode.CONFIG, what=what, action=secret_fix(Path(path))) from None
    except UnicodeDecodeError:
        text, data = "", b""
    if len(data) > MAX_SECRET_BYTES or not text.strip():
        what = f"the secret file {path} of {name}_FILE is empty, too large or not text"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="the secret on one line",
            action="check which file is mounted at that path",
        )
    return text.strip("\r\n")
