"""Which routes of the vLLM server nibble lets through, and why.

The rule: a route is listed when all it does is run inference or tokenization on the request's own
content, or report on the server. Whatever changes the server, aborts other people's requests, loads
something, or is a second door to a listed route stays unlisted and answers 404.
tests/e2e/test_gate_routes.py holds the reason for each unlisted route of vLLM 0.32.0 and fails when
vLLM registers a route that is in neither list.
"""

from __future__ import annotations

import re
from typing import Any

WEBSOCKET = "WEBSOCKET"  # stands where HTTP has its method

# Open without a key. Once ready, vLLM answers /health (it notices a dead engine); the gate answers
# /ready.
HEALTH_PATH = "/health"
READY_PATH = "/ready"
OPEN_PATHS = frozenset({HEALTH_PATH, READY_PATH})
OPEN_METHODS = frozenset({"GET", "HEAD"})

# OPTIONS: CORS preflight, answered by vLLM's own CORS middleware
_POST = frozenset({"POST", "OPTIONS"})
_GET = frozenset({"GET", "OPTIONS"})

LISTED: dict[str, frozenset[str]] = {
    HEALTH_PATH: OPEN_METHODS,
    READY_PATH: OPEN_METHODS,
    # OpenAI
    "/v1/models": _GET,
    "/v1/chat/completions": _POST,
    "/v1/chat/completions/batch": _POST,  # several conversations in one request
    "/v1/completions": _POST,
    "/v1/responses": _POST,
    "/v1/embeddings": _POST,
    "/v1/audio/transcriptions": _POST,
    "/v1/audio/translations": _POST,
    "/v1/realtime": frozenset({WEBSOCKET}),
    # Anthropic
    "/v1/messages": _POST,
    "/v1/messages/count_tokens": _POST,
    # Cohere and Jina clients of embedding, reranking and scoring models
    "/v2/embed": _POST,
    "/rerank": _POST,
    "/v1/rerank": _POST,
    "/v2/rerank": _POST,
    "/score": _POST,
    "/v1/score": _POST,
    "/classify": _POST,
    # vLLM's own: scoring and structured answers by the served model
    "/generative_scoring": _POST,
    "/v1/systemone": _POST,
    # Needed by evaluation and benchmark tools
    "/tokenize": _POST,
    "/detokenize": _POST,
    # Reports
    "/version": _GET,
    "/metrics": _GET,
}

# /v1/responses/{response_id} and its /cancel: the random id names the caller's own request.
_RESPONSE = re.compile(r"/v1/responses/(?!render(?:/|\Z))[A-Za-z0-9_-]{1,128}(/cancel)?", re.ASCII)


def allowed_methods(path: str) -> frozenset[str] | None:
    """The methods let through on `path`, which is `router_path`'s; None where the path is not
    listed.
    """
    methods = LISTED.get(path)
    if (
        methods is None
        and path.startswith("/v1/responses/")
        and (found := _RESPONSE.fullmatch(path))
    ):
        return _POST if found[1] else _GET
    return methods


def router_path(scope: dict[str, Any]) -> str:
    """The path vLLM's router will match: `scope["path"]` less the root path.

    Must agree with starlette 1.10 _utils.py get_route_path (the end-to-end test compares them): a
    root path is only taken off where a "/" follows it, and a path that does not begin with it is
    routed as it is.
    """
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if not root or not path.startswith(root):
        return path
    rest = path[len(root) :]
    return rest if not rest or rest[0] == "/" else path


def is_canonical(scope: dict[str, Any]) -> bool:
    """Whether the path came as it reads: nothing percent-encoded.

    Every listed path is plain ASCII, so an encoded byte in it (%2e%2e, %2F, %00, %68ealth) is a
    probe. Doubled slashes, dots, trailing slashes and other case need no rule: no listed path has
    them. Servers that do not send raw_path (it is optional in ASGI) leave the decoded path alone to
    decide.
    """
    raw_path: bytes | None = scope.get("raw_path")
    return raw_path is None or b"%" not in raw_path
