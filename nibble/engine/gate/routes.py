"""The routes of the vLLM server that the gate passes on.

A listed route runs inference or tokenization on the content of the request, or reports on the
server. A route that changes the server, aborts other clients' requests, loads data, or duplicates a
listed route is not listed, and the gate answers 404. tests/e2e/test_gate_routes.py has the reason
for each unlisted route of vLLM 0.32.0 and fails for a route in neither list.
"""

from __future__ import annotations

import re
from typing import Any

from nibble.engine.page.files import FILE_PATHS, LIVE_PATH, STATUS_PATH

WEBSOCKET = "WEBSOCKET"  # in place of the HTTP method

# Routes that need no key. The gate answers /ready. Once the server is ready, vLLM answers /health,
# because it notices a dead engine.
HEALTH_PATH = "/health"
READY_PATH = "/ready"
# The status page's files hold no data, and a browser cannot send the key when it opens a page. Its
# data (DATA_PATHS) need the key.
OPEN_PATHS = frozenset({HEALTH_PATH, READY_PATH}) | FILE_PATHS
OPEN_METHODS = frozenset({"GET", "HEAD"})
DATA_PATHS = frozenset({LIVE_PATH, STATUS_PATH})
# For `nibble trace`. The gate passes them on only where the owner set --profiler-config: a profile
# slows every client down and fills a disk.
PROFILER_PATHS = ("/start_profile", "/stop_profile")

# OPTIONS: CORS preflight requests, which vLLM's CORS middleware answers.
_POST = frozenset({"POST", "OPTIONS"})
_GET = frozenset({"GET", "OPTIONS"})
_READ = frozenset({"GET"})

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
    # vLLM's extensions: scoring and structured answers by the served model
    "/generative_scoring": _POST,
    "/v1/systemone": _POST,
    # Needed by evaluation and benchmark tools
    "/tokenize": _POST,
    "/detokenize": _POST,
    **dict.fromkeys(PROFILER_PATHS, _POST),
    # Reports
    "/version": _GET,
    "/metrics": _GET,
}

# /v1/responses/{response_id} and /cancel: only the client of a response knows its random id.
_RESPONSE = re.compile(r"/v1/responses/(?!render(?:/|\Z))[A-Za-z0-9_-]{1,128}(/cancel)?", re.ASCII)


def allowed_methods(path: str) -> frozenset[str] | None:
    """The methods that are answered for `path` (see router_path); None if it is not listed."""
    if path in FILE_PATHS:
        return OPEN_METHODS
    if path in DATA_PATHS:
        return _READ
    methods = LISTED.get(path)
    is_response = methods is None and path.startswith("/v1/responses/")
    if is_response and (match := _RESPONSE.fullmatch(path)):
        return _POST if match[1] else _GET
    return methods


def router_path(scope: dict[str, Any]) -> str:
    """The path that vLLM's router matches: `scope["path"]` without the root path.

    Agrees with starlette 1.10 _utils.py get_route_path, which tests/e2e/test_gate_routes.py checks:
    a root path is removed only if a "/" follows it; other paths are routed unchanged.
    """
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if not root or not path.startswith(root):
        return path
    rest = path[len(root) :]
    return rest if not rest or rest[0] == "/" else path


def is_canonical(scope: dict[str, Any]) -> bool:
    """Whether the path is not percent-encoded.

    Every listed path is plain ASCII, so an encoded byte (%2e%2e, %2F, %00, %68ealth) is a probe.
    Doubled slashes, dots, trailing slashes and other case need no check, because no listed path has
    them. raw_path is optional in ASGI; without it the decoded path decides.
    """
    raw_path: bytes | None = scope.get("raw_path")
    return raw_path is None or b"%" not in raw_path
