"""Refusals of the guard, and the error bodies of nibble's answers."""

from __future__ import annotations

import json

# The names of these errors in OpenAI's clients and in vLLM (vllm 0.32
# serve/exception_handling/error_response.py).
KINDS = {
    400: "BadRequestError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    431: "RequestHeadersTooLargeError",
    503: "ServiceUnavailableError",
}


class Refused(Exception):
    """The request is refused with an HTTP status and a message for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def kind(self) -> str:
        """The `type` of the error body."""
        return KINDS[self.status]


def error_body(status: int, kind: str, message: str, **extra: str) -> bytes:
    """A JSON error in the shape of OpenAI's API and of vLLM's ErrorResponse."""
    error = {"message": message, "type": kind, "param": None, "code": status, **extra}
    return json.dumps({"error": error}).encode()
