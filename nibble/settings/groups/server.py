"""The address, the key and the time limits of a server."""

from __future__ import annotations

import re

from pydantic import BaseModel, SecretStr, field_validator

from nibble.settings.declare import option


class ServerOptions(BaseModel):
    """The group `Server`."""

    host: str = option(
        "127.0.0.1",
        "Server",
        "Address to listen on; the image sets 0.0.0.0.",
        "HOST",
        flag="--host",
        expected="an IP address or localhost",
        min_length=1,
    )
    port: int = option(
        8000,
        "Server",
        "Port of the OpenAI-compatible API.",
        "PORT",
        flag="--port",
        expected="a whole number from 1 to 65535",
        ge=1,
        le=65535,
    )
    control_port: int = option(
        8001,
        "Server",
        "Loopback port of the status page, /status and /ready; nibble opens it before vLLM starts.",
        "NIBBLE_CONTROL_PORT",
        flag="--control-port",
        expected="a whole number from 1 to 65535",
        ge=1,
        le=65535,
    )
    api_key: SecretStr | None = option(
        None,
        "Server",
        "Key that clients must send. nibble also reads VLLM_API_KEY. Default: a generated key"
        " on any address but loopback, else none.",
        ("NIBBLE_API_KEY", "VLLM_API_KEY"),
        secret=True,
        expected="a key of at least 8 visible characters",
    )
    allow_anonymous: bool = option(
        False,
        "Server",
        "Permission to serve without a key on an address other than loopback: 1 or 0.",
        "NIBBLE_ALLOW_ANONYMOUS",
        flag="--allow-anonymous",
        expected="1 or 0",
    )
    drain_seconds: int = option(
        30,
        "Server",
        "Seconds that running requests may take to finish after SIGTERM.",
        "NIBBLE_DRAIN_SECONDS",
        flag="--drain-seconds",
        expected="a whole number of seconds from 0 to 86400",
        ge=0,
        le=86400,
    )
    stall_seconds: int = option(
        300,
        "Server",
        "Seconds without a sign of the engine after which nibble reports a stall; nibble does"
        " not end vLLM.",
        "NIBBLE_STALL_SECONDS",
        flag="--stall-seconds",
        expected="a whole number of seconds from 1 to 86400",
        ge=1,
        le=86400,
    )
    hang_seconds: int = option(
        60,
        "Server",
        "Seconds without progress after which nibble ends a hung vLLM (exit 10); 0 disables the"
        " hang watch.",
        "NIBBLE_HANG_SECONDS",
        flag="--hang-seconds",
        expected="a whole number of seconds from 0 to 86400",
        ge=0,
        le=86400,
    )

    @field_validator("api_key")
    @classmethod
    def _usable_key(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch(r"[\x21-\x7e]{8,}", value.get_secret_value()):
            raise ValueError("too short, or with blanks or control characters")
        return value
