"""Rows about ports, addresses, folders, and servers in the background."""

from __future__ import annotations

from tests.support.bad_input.case import (
    Case,
    Row,
    env,
    file,
    row,
    serve,
    serve_as_another_user,
    subfolder,
)


def machine_rows() -> list[Row]:
    """Ports, addresses and folders."""
    return [
        row(
            "port-in-use",
            "`PORT` in use",
            5,
            "PORT … is in use on 127.0.0.1; stop what listens there or set another PORT",
            env(PORT="{used_port}"),
        ),
        row(
            "control-port-in-use",
            "`NIBBLE_CONTROL_PORT` in use",
            5,
            "NIBBLE_CONTROL_PORT … is in use on 127.0.0.1; stop what listens there or set another "
            "NIBBLE_CONTROL_PORT",
            env(NIBBLE_CONTROL_PORT="{used_port}"),
        ),
        row(
            "same-ports",
            "`PORT` and `NIBBLE_CONTROL_PORT` equal",
            5,
            "PORT and NIBBLE_CONTROL_PORT are both 8001; …",
            env(PORT="8001", NIBBLE_CONTROL_PORT="8001"),
        ),
        row(
            "host-elsewhere",
            "an address this machine does not have",
            5,
            "HOST 192.0.2.7 is not an address of this machine; …",
            serve("{model}", "--host", "192.0.2.7"),
            env(HOST="192.0.2.7"),
        ),
        row(
            "cache-blank",
            "a blank in the path of nibble's cache",
            5,
            "the path of the cache, …/my cache/engine/…, has a blank, which breaks compilation"
            " there; name a folder without blanks with NIBBLE_CACHE_DIR",
            serve("{model}", NIBBLE_CACHE_DIR="{tmp}/my cache"),
        ),
        row(
            "cache",
            "nibble's cache cannot be written",
            5,
            "cannot write to … (Not a directory); …",
            serve("{model}", NIBBLE_CACHE_DIR="{tmp}/file/cache", prepare=file("file", b"")),
            serve("{model}", VLLM_CACHE_ROOT="{tmp}/file/cache", prepare=file("file", b"")),
        ),
        row(
            "cache-of-another-user",
            "nibble's cache belongs to another user",
            5,
            "cannot write to … (Permission denied); run `chown -R 2000:0 …/cache`, or start the"
            " container with `--user 0:0`, or name another folder with NIBBLE_CACHE_DIR",
            serve_as_another_user(
                "{model}", NIBBLE_CACHE_DIR="{tmp}/cache", prepare=subfolder("cache")
            ),
        ),
        row(
            "hub-cache",
            "the Hugging Face cache cannot be written and lacks the model",
            5,
            "cannot write to … (Not a directory); …",
            serve("acme/tiny", HF_HOME="{tmp}/file/hf", prepare=file("file", b"")),
            Case(("pull", "acme/tiny"), {"HF_HOME": "{tmp}/file/hf"}, file("file", b"")),
        ),
        row(
            "prune-without-limit",
            "`nibble cache prune` without a limit",
            2,
            "`nibble cache prune` needs a condition; pass --older-than DAYS, --max-gib N or"
            " --all-but-current",
            Case(("cache", "prune")),
        ),
        row(
            "no-log",
            "`nibble logs` where no server was started in the background",
            2,
            "no background server has run on port 8000; …",
            Case(("logs", "--port", "8000")),
        ),
        row(
            "status-of-none",
            "`nibble status` where no server runs, or something else has its control port",
            10,
            "nibble does not answer on control port … (…); start a server with `make serve`, or set"
            " NIBBLE_CONTROL_PORT to the running one's",
            Case(("status",), {"NIBBLE_CONTROL_PORT": "{used_port}"}),
        ),
        row(
            "bundle-exists",
            "`nibble doctor --bundle` with a file that exists",
            5,
            "… cannot be written (File exists); expected a new file; …",
            Case(("doctor", "--bundle", "{tmp}/file"), {"HF_HUB_OFFLINE": "1"}, file("file", b"")),
        ),
    ]
