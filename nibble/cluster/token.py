"""The cluster's token: created on the head, copied to every node, required by Ray and agents."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from nibble.errors import ExitCode, NibbleError
from nibble.machine.disk import secret_fix, secret_mode
from nibble.machine.paths import cache_dir
from nibble.settings.options import Settings
from nibble.settings.redact import is_secret_name

TOKEN_FILE = "ray_auth_token"
# Secrets that no Ray node has in its environment, and that the server does not copy to other nodes.
_SECRETS = "NIBBLE_API_KEY VLLM_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN NIBBLE_CLUSTER_TOKEN"
SECRETS = frozenset(f"{name}{form}" for name in _SECRETS.split() for form in ("", "_FILE"))


def token_path(settings: Settings, environ: Mapping[str, str]) -> Path:
    """The file in which a head keeps the token, and in which other nodes look for a copy."""
    return (settings.cache_dir or cache_dir(environ)) / TOKEN_FILE


def heads_token(settings: Settings, environ: Mapping[str, str]) -> tuple[str, str]:
    """(token, where it is): the given token, else the one in the head's file, which the first start
    creates (mode: `secret_mode`).

    Raises CONFIG if the file cannot be created or read.
    """
    if settings.ray_auth_token:
        return settings.ray_auth_token.get_secret_value(), "in RAY_AUTH_TOKEN"
    path = token_path(settings, environ)
    return head_token(path), f"in {path}; copy that file to each worker (RAY_AUTH_TOKEN_FILE)"


def head_token(path: Path) -> str:
    """The token in `path`, created if absent (mode: `secret_mode`). Raises CONFIG if the file
    cannot be created or read.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as file:
                os.fchmod(descriptor, secret_mode(path.parent))
                file.write(secrets.token_hex(32) + "\n")
    except OSError as error:
        what = f"the Ray token file {path} cannot be made ({error.strerror})"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="a writable cache folder",
            action="set NIBBLE_CACHE_DIR",
        ) from None
    return _stored_token(path)


def members_token(settings: Settings, environ: Mapping[str, str], role: str) -> str:
    """The given token, else the one in the token file. Raises USAGE if there is neither; `role`
    completes "… needs".
    """
    if settings.ray_auth_token:
        return settings.ray_auth_token.get_secret_value()
    path = token_path(settings, environ)
    if path.exists():
        return _stored_token(path)
    what = f"{role} needs the cluster's token"
    raise NibbleError(
        ExitCode.USAGE,
        what=what,
        expected="RAY_AUTH_TOKEN_FILE",
        action=f"copy the file that the head printed, here to {path}",
    )


def _stored_token(path: Path) -> str:
    try:
        token = path.read_bytes().strip().decode(errors="replace")
    except OSError as error:
        what = f"the Ray token file {path} cannot be read ({error.strerror})"
        raise NibbleError(ExitCode.CONFIG, what=what, action=secret_fix(path)) from None
    # HTTP cannot send other characters, and its error would show the token.
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        what = f"the Ray token file {path} is empty or does not hold a token"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="one word",
            action="delete it and start again, or copy the head's file to it",
        )
    return token


def withhold_from_ray(environ: Mapping[str, str]) -> None:
    """Keep secrets out of what vLLM copies to other nodes.

    vLLM's Ray executor copies the whole environment except the names in this file (vllm 0.32
    v1/executor/ray_env_utils.py:12, ray/ray_env.py). nibble recognises other programs' secrets by
    their names. Raises CONFIG if the file cannot be read or written.
    """
    config = environ.get("XDG_CONFIG_HOME") or f"{environ.get('HOME') or Path.home()}/.config"
    folder = Path(environ.get("VLLM_CONFIG_ROOT") or f"{config}/vllm").expanduser()
    path = folder / "ray_non_carry_over_env_vars.json"
    ray_names, gate_names = (
        ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"),
        ("NIBBLE_GATE_STATE", "NIBBLE_GATE_INTERNAL", "NIBBLE_GATE_CONTROL"),
    )
    withheld = {*ray_names, *gate_names, *SECRETS}
    # Some VLLM_ names contain TOKEN, but are counts of tokens.
    withheld |= {name for name in environ if is_secret_name(name) and not name.startswith("VLLM_")}
    try:
        names = set(json.loads(path.read_text())) if path.exists() else set()
        if withheld <= names:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(sorted(names | withheld), indent=1))
        partial.rename(path)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        what = (
            f"{path} cannot be read or written ({error}), which keeps secrets from every other node"
        )
        raise NibbleError(
            ExitCode.CONFIG, what=what, expected="a writable folder", action="set VLLM_CONFIG_ROOT"
        ) from None
