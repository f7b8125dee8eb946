"""Decides whether the server requires a key, and which one.

A loopback bind needs none. Any other needs one, unless NIBBLE_ALLOW_ANONYMOUS is set: the user's,
else one that nibble generates once and keeps in the cache volume, so that restarts do not change
it.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nibble.errors import ExitCode, NibbleError
from nibble.machine.disk import secret_mode

KEY_FILE = "api_key"
KEY_PREFIX = "nbl-"  # lets secret scanners and people recognise it
_RANDOM_BYTES = 32
_SHORTEST_STORED = 16  # characters; nibble's keys have 47, so a shorter file is damaged
_LONGEST = 1024  # characters; keeps clear of the servers' header limits

Source = Literal["given", "stored", "generated", "loopback", "anonymous"]


@dataclass(frozen=True, slots=True)
class KeyDecision:
    """The key (None: not required), its source, its file if any, and the reason. repr hides the
    key.
    """

    key: str | None = field(repr=False)
    source: Source
    path: Path | None
    reason: str


def resolve_api_key(
    host: str, given_key: str | None, allow_anonymous: bool, cache_dir: Path
) -> KeyDecision:
    """Decide on the key for a server bound to `host`; may create `cache_dir`/api_key.

    Its mode is 0600, or 0640 in a folder that its group shares (see `secret_mode`). Raises
    NibbleError(CONFIG) for a key that an HTTP header cannot carry and for a key file that cannot be
    created, read or trusted. Messages never contain a key.
    """
    if given_key:
        _require_sendable(given_key)
        return KeyDecision(given_key, "given", None, "the key of NIBBLE_API_KEY")
    if is_loopback(host):
        return KeyDecision(None, "loopback", None, f"{host} is reachable from this machine only")
    if allow_anonymous:
        return KeyDecision(
            None,
            "anonymous",
            None,
            f"NIBBLE_ALLOW_ANONYMOUS is set: every client that reaches {host} is admitted",
        )
    path = cache_dir / KEY_FILE
    made = _store_new_key(path)
    key, note = _read_key(path)
    reason = "generated at this start" if made else "generated at an earlier start"
    return KeyDecision(
        key,
        "generated" if made else "stored",
        path,
        f"{reason}, because {host} is not loopback{note}",
    )


def is_loopback(host: str) -> bool:
    """Whether binding `host` reaches this machine only.

    It does not look up names other than localhost, because DNS can change. vLLM takes an empty host
    as every interface.
    """
    name = host.strip().removeprefix("[").removesuffix("]").lower()
    if name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _is_sendable(key: str) -> bool:
    return 0 < len(key) <= _LONGEST and all("!" <= character <= "~" for character in key)


def _require_sendable(key: str) -> None:
    if not _is_sendable(key):
        raise NibbleError(
            ExitCode.CONFIG,
            what="NIBBLE_API_KEY has characters that an HTTP header cannot carry",
            expected=f"1 to {_LONGEST} printable ASCII characters without spaces",
            action="create one with: openssl rand -hex 32",
        )


def _store_new_key(path: Path) -> bool:
    """Create the key file unless it exists; True when this call did. Readers see a whole file."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            return False
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                os.fchmod(descriptor, secret_mode(path.parent))
                file.write(KEY_PREFIX + secrets.token_urlsafe(_RANDOM_BYTES) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.link(scratch, path)  # fails when another start was faster: then that key counts
        finally:
            scratch.unlink(missing_ok=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise _key_file_error(path, f"cannot be made ({error.strerror})") from None
    return True


def _read_key(path: Path) -> tuple[str, str]:
    """The stored key and a note for the reason (empty, or that its permissions were tightened)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise _key_file_error(path, f"cannot be read ({error.strerror})") from None
    try:
        note = _tighten(path, descriptor)
        key = os.read(descriptor, _LONGEST + 2).decode("ascii", errors="replace").removesuffix("\n")
    finally:
        os.close(descriptor)
    if not _is_sendable(key) or len(key) < _SHORTEST_STORED:
        raise _key_file_error(path, "is empty or damaged")
    return key, note


def _tighten(path: Path, descriptor: int) -> str:
    """Set the file's mode; refuse a file that other users could have written.

    Group bits are only tightened: Kubernetes' fsGroup sets them on every file of a volume at each
    start.
    """
    status, mode = os.fstat(descriptor), secret_mode(path.parent)
    if not stat.S_ISREG(status.st_mode):
        raise _key_file_error(path, "is not a regular file")
    is_shared = mode == 0o640 and status.st_gid == os.getegid()
    if os.geteuid() != 0 and status.st_uid not in (os.geteuid(), 0) and not is_shared:
        raise _key_file_error(path, f"belongs to another user (uid {status.st_uid})")
    if status.st_mode & stat.S_IWOTH:
        raise _key_file_error(
            path, "is writable by every user, so any user may have written the key"
        )
    if not status.st_mode & 0o777 & ~mode:
        if is_shared and status.st_uid == os.geteuid():  # from before its folder was shared
            os.fchmod(descriptor, mode)
        return ""
    try:
        os.fchmod(descriptor, mode)
    except OSError as error:
        raise _key_file_error(
            path, f"is readable by other users and chmod fails ({error.strerror})"
        ) from None
    if os.fstat(descriptor).st_mode & 0o777 & ~mode:  # filesystems that accept chmod and ignore it
        raise _key_file_error(path, "is readable by other users and its file system ignores chmod")
    return f"; its file was readable by other users and has mode {mode:04o} now"


def _key_file_error(path: Path, problem: str) -> NibbleError:
    return NibbleError(
        ExitCode.CONFIG,
        what=f"the key file {path} {problem}",
        expected="a regular file of mode 0600 that this user owns",
        action=f"run `rm {path}` to get a new key, or give one in NIBBLE_API_KEY or"
        " NIBBLE_API_KEY_FILE",
    )
