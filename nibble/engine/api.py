"""Checks that the server is ready: asks its API as a client would, with nibble's pass of the gate.

Ready means: /v1/models lists every name we serve under, and a generating model has answered one
token. vLLM reports healthy earlier than that, and the first request can take long where it
compiles.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from nibble.errors import ExitCode, NibbleError

INTERNAL_HEADER = "x-nibble-internal"
_LOOK_TIMEOUT_S = 5.0
_RATE_TOKENS = 12
_FIRST_TOKEN_TIMEOUT_S = 1800.0  # compilation of 30 minutes is reported
_IN_FLIGHT = ("vllm:num_requests_running", "vllm:num_requests_waiting")


@dataclass(frozen=True)
class Api:
    """The server's address on this machine, and the token of the supervisor's requests."""

    host: str
    port: int
    internal_token: str
    tls: bool = False

    @property
    def url(self) -> str:
        """Base URL, as users write it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    def call(
        self, path: str, body: Any = None, timeout_s: float = _LOOK_TIMEOUT_S
    ) -> tuple[int, bytes]:
        """(status, body) of a GET, or of a POST where there is a body. OSError without an
        answer.
        """
        connection = self.connect(timeout_s)
        try:
            headers = {
                INTERNAL_HEADER: self.internal_token,
                "Content-Type": "application/json",
                "Connection": "close",
            }
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from None
        finally:
            connection.close()

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """A connection for a request that brings its key itself, or none."""
        if not self.tls:
            return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        # Our own child on this machine; its certificate names the public host.
        context = ssl._create_unverified_context()
        return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=context)


def reachable_host(host: str) -> str:
    """The address at which this machine reaches a server bound to `host`."""
    name = host.strip().removeprefix("[").removesuffix("]")
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(name, name)


def is_healthy(api: Api) -> bool:
    """Whether /health of vLLM answers 200; vLLM knows when its engine is dead."""
    try:
        return api.call("/health")[0] == 200
    except OSError:
        return False


def lists_models(api: Api, names: Collection[str]) -> bool:
    """Whether /v1/models answers with all `names`; False without an answer."""
    try:
        status, body = api.call("/v1/models")
        found = {model["id"] for model in json.loads(body)["data"]} if status == 200 else set()
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return set(names) <= found


def answer_one_token(api: Api, name: str, required: bool = True) -> None:
    """Let the model generate one token. Raises CANARY if it refuses; OSError if the connection
    breaks.

    The token is sampled: in eager mode on an H200 the first request with top_p waited 57 s for
    FlashInfer to compile its sampling kernels, and a ready server must have that behind it. Without
    `required`, a server without that route (404, an embedding model) passes.
    """
    body = {
        "model": name,
        "prompt": "Hello",
        "max_tokens": 1,
        "temperature": 1,
        "top_p": 0.9,
        "top_k": 20,
    }
    status, answer = api.call("/v1/completions", body, _FIRST_TOKEN_TIMEOUT_S)
    if status != 200 and (required or status != 404):
        text = " ".join(answer.decode(errors="replace").split())[:300]
        what = f"the first request, one token from {name}, got status {status}: {text}"
        raise NibbleError(ExitCode.CANARY, what=what, expected="200", action="see the log above")


def decode_rate(api: Api, name: str) -> float | None:
    """Tokens per second of one short sequence; None if the server does not answer as expected."""
    seconds = []
    for tokens in (1, 1 + _RATE_TOKENS):
        body = {"model": name, "prompt": "Hello", "max_tokens": tokens, "temperature": 0}
        began = time.perf_counter()
        status, _ = api.call("/v1/completions", body | {"ignore_eos": True}, _FIRST_TOKEN_TIMEOUT_S)
        seconds.append(time.perf_counter() - began)
        if status != 200:
            return None
    return _RATE_TOKENS / (seconds[1] - seconds[0]) if seconds[1] > seconds[0] else None


def requests_in_flight(api: Api) -> int | None:
    """Requests that engines hold, running or waiting, from /metrics; None if unknown."""
    from nibble.engine.metrics import totals

    try:
        status, body = api.call("/metrics", timeout_s=2.0)
    except OSError:
        return None
    counts = totals(body.decode(errors="replace"), _IN_FLIGHT) if status == 200 else {}
    return round(sum(counts.values())) if counts else None
