"""`nibble chat`: sends one question to this machine's server and streams the answer."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping

from nibble.errors import ExitCode, NibbleError
from nibble.serve.endpoint import error_message, local_endpoint

TIMEOUT_SECONDS = 600


def ask(question: str, model: str, max_tokens: int, environ: Mapping[str, str]) -> None:
    """Print the answer to `question`. Raises NibbleError where no server answers or the server
    refuses.
    """
    endpoint = local_endpoint(environ)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    connection = endpoint.connect(TIMEOUT_SECONDS)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), endpoint.headers())
        response = connection.getresponse()
        if response.status != 200:
            raise _refused(response.status, response.read())
        for piece in _pieces(response):
            print(piece, end="", flush=True)
        print()
    except OSError as error:
        raise endpoint.no_answer(error, environ, "chat QUESTION") from None
    except (
        http.client.HTTPException
    ) as error:  # vLLM ended during the answer, or the program is not an HTTP server
        what = f"the answer of {endpoint.address} ended early ({type(error).__name__})"
        raise NibbleError(
            ExitCode.ENGINE_DIED, what=what, action="see `nibble status` and `nibble logs`"
        ) from None
    finally:
        connection.close()


def _refused(status: int, body: bytes) -> NibbleError:
    action = "set NIBBLE_API_KEY" if status == 401 else "see `nibble status`"
    what = f"the server answered {status}: {error_message(body).rstrip('. ')}"
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
