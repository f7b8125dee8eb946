"""`nibble chat`: sends one question to this machine's server and streams the answer."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping

from nibble.errors import ExitCode, NibbleError
from nibble.machine.host import elsewhere_hint
from nibble.machine.paths import cache_dir
from nibble.plan.gather import read_wishes
from nibble.serve.api_key import KEY_FILE
from nibble.settings.options import Settings

TIMEOUT_SECONDS = 600


def ask(question: str, model: str, max_tokens: int, environ: Mapping[str, str]) -> None:
    """Print the answer to `question`. Raises NibbleError where no server answers or the server
    refuses.
    """
    settings = read_wishes([], environ).settings
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    connection = http.client.HTTPConnection(host, settings.port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), _headers(settings, environ)
        )
        response = connection.getresponse()
        if response.status != 200:
            raise _refused(response.status, response.read().decode(errors="replace"))
        for piece in _pieces(response):
            print(piece, end="", flush=True)
        print()
    except OSError as error:
        what = f"no server answers at {host}:{settings.port} ({error.strerror or error})"
        start = (
            "start one with `nibble serve`"
            if "NIBBLE_IMAGE" in environ
            else "start one with `make serve`"
        )
        action = f"{start} and wait for `ready`{elsewhere_hint(environ, 'chat QUESTION')}"
        raise NibbleError(
            ExitCode.ENGINE_DIED, what=what, expected="a running server", action=action
        ) from None
    except (
        http.client.HTTPException
    ) as error:  # vLLM ended during the answer, or the program is not an HTTP server
        what = f"the answer of {host}:{settings.port} ended early ({type(error).__name__})"
        raise NibbleError(
            ExitCode.ENGINE_DIED, what=what, action="see `nibble status` and `nibble logs`"
        ) from None
    finally:
        connection.close()


def _headers(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    key = settings.api_key.get_secret_value() if settings.api_key else None
    stored = (settings.cache_dir or cache_dir(environ)) / KEY_FILE
    if key is None:
        with contextlib.suppress(
            OSError
        ):  # none, or another user's: a server that wants it says so
            key = stored.read_text().strip()
    return {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )


def _refused(status: int, text: str) -> NibbleError:
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:200]
    action = "set NIBBLE_API_KEY" if status == 401 else "see `nibble status`"
    what = f"the server answered {status}: {str(message).rstrip('. ')}"
    return NibbleError(ExitCode.USAGE, what=what, action=action)


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """Text pieces of a server-sent event stream. Raises where the stream carries an error
    instead of an end.
    """
    for raw in response:
        line = raw.decode().strip()
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise NibbleError(
                ExitCode.ENGINE_DIED,
                what=f"the answer ended early: {event['error'].get('message', event['error'])}",
                action="ask again",
            )
        for choice in event.get("choices", []):
            yield choice.get("delta", {}).get("content") or ""
