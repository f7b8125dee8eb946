"""What an engine of several models takes from the server above it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

WATCHED_ABOVE = "NIBBLE_WATCHED_ABOVE"
_INTERNAL = "NIBBLE_GATE_INTERNAL"


def is_watched_above(environ: Mapping[str, str]) -> bool:
    """Whether that server watches the memory in this engine's place."""
    return environ.get(WATCHED_ABOVE) == "1"


def internal_token(environ: Mapping[str, str]) -> str:
    """The token of the supervisor's requests to the gate, which that server knows too; else a new
    one.
    """
    given = environ.get(_INTERNAL, "")
    return given if is_watched_above(environ) and given else secrets.token_urlsafe(32)
