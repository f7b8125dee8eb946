"""How a client reaches a running server: its address, and the key that may go there."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from nibble.engine.api import reachable_host
from nibble.errors import ExitCode, NibbleError
from nibble.machine.host import elsewhere_hint, start_command
from nibble.machine.paths import cache_dir
from nibble.plan.gather import read_wishes
from nibble.serve.api_key import KEY_FILE
from nibble.settings.options import Settings


@dataclass(frozen=True)
class Endpoint:
    """A server's API. `key` is None where there is none to send."""

    host: str
    port: int
    key: str | None = field(default=None, repr=False)
    tls: bool = False

    @property
    def address(self) -> str:
        """`HOST:PORT`, as messages name it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Base URL, without a path."""
        return f"{'https' if self.tls else 'http'}://{self.address}"

    @property
    def is_local(self) -> bool:
        """Whether it is a loopback address."""
        if self.host == "localhost":
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False

    def headers(self) -> dict[str, str]:
        """Of a request with a JSON body."""
        authorization = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {"Content-Type": "application/json", **authorization}

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """A connection, opened by its first request."""
        if self.tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                self.host, self.port, timeout=timeout_s, context=context
            )
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)

    def call(self, path: str, body: Any = None, timeout_s: float = 30.0) -> tuple[int, bytes]:
        """(status, body) of a GET, or of a POST where there is a body. OSError without an
        answer.
        """
        connection = self.connect(timeout_s)
        try:
            method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
            connection.request(method, path, data, self.headers())
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{type(error).__name__} {error}".strip()) from None
        finally:
            connection.close()

    def no_answer(self, error: OSError, environ: Mapping[str, str], words: str) -> NibbleError:
        """The error for a server that is not there; `words` follow `nibble` in a container."""
        start = start_command(environ)
        return NibbleError(
            ExitCode.ENGINE_DIED,
            what=f"no server answers at {self.address} ({error.strerror or error})",
            expected="a running server",
            action=f"start one with {start} and wait for `ready`{elsewhere_hint(environ, words)}",
        )


def local_endpoint(environ: Mapping[str, str]) -> Endpoint:
    """The API of this machine's server, from HOST and PORT, with its key."""
    settings = read_wishes([], environ).settings
    host = reachable_host(settings.host)
    return Endpoint(host, settings.port, _given_key(settings) or _stored_key(settings, environ))


def endpoint_at(url: str, environ: Mapping[str, str]) -> Endpoint:
    """The API at `url`. Raises USAGE where it is not an address.

    The key that nibble stored here goes to this machine only; any other server gets only the key
    that the user set.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    is_known = parts.scheme in ("http", "https") and parts.path in ("", "/", "/v1", "/v1/")
    if not host or not is_known or parts.username:
        raise NibbleError(
            ExitCode.USAGE,
            what=f"{url!r} is not the address of a server",
            expected="http://HOST:PORT or https://HOST:PORT",
            action="correct the address",
        )
    settings, tls = read_wishes([], environ).settings, parts.scheme == "https"
    found = Endpoint(host, port or (443 if tls else 80), _given_key(settings), tls)
    if found.key is None and found.is_local:
        return Endpoint(found.host, found.port, _stored_key(settings, environ), tls)
    return found


def error_message(body: bytes) -> str:
    """The message of an error's body, else its first 200 characters."""
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
        return str(found["error"]["message"] if "error" in found else found["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return text[:200]


def _given_key(settings: Settings) -> str | None:
    return settings.api_key.get_secret_value() if settings.api_key else None


def _stored_key(settings: Settings, environ: Mapping[str, str]) -> str | None:
    # None, or another user's: a server that wants it says so.
    with contextlib.suppress(OSError):
        return ((settings.cache_dir or cache_dir(environ)) / KEY_FILE).read_text().strip() or None
    return None
