"""The limits of a request, as the gate inside vLLM reads them from its environment."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

TEXT_BODY_BYTES = 32 << 20
SMALL_BYTES = 2048
_SMALL_MESSAGES = SMALL_BYTES // 3  # "{},"
BODIES_AT_A_TIME = 8


@dataclass(frozen=True)
class RequestLimits:
    """Options of the group "Requests" under their own names, and their defaults; None: the gate
    asks the model.
    """

    max_body_bytes: int = TEXT_BODY_BYTES
    max_buffered_bytes: int = 0  # 0: BODIES_AT_A_TIME bodies
    head_seconds: int = 10
    body_gap_seconds: int = 10
    body_seconds: int = 120
    max_connections: int = 4096
    max_connections_per_address: int = 2048
    max_json_depth: int = 64
    max_json_keys: int = 20000
    max_json_items: int | None = None
    max_messages: int = 2048
    max_sequences: int = 1024
    max_text_chars: int | None = None
    max_logprob_entries: int = 262144
    grammar_seconds: int = 2
    grammar_memory_mib: int = 256
    grammar_bytes: int = 1048576

    @functools.cached_property
    def allow_small_bodies(self) -> bool:
        """Whether no body of SMALL_BYTES can have too many messages or too much text."""
        return (
            self.max_messages >= _SMALL_MESSAGES
            and (self.max_text_chars or SMALL_BYTES) >= SMALL_BYTES
        )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> RequestLimits:
        """What the plan put there (plan_limits.py); the defaults elsewhere."""
        given = {
            field.name: int(environ[variable_of(field.name)])
            for field in fields(cls)
            if environ.get(variable_of(field.name))
        }
        found = cls(**given)
        return replace(
            found,
            max_buffered_bytes=found.max_buffered_bytes or BODIES_AT_A_TIME * found.max_body_bytes,
        )


def variable_of(name: str) -> str:
    """The environment variable of the field `name`, as options name it (a unit test compares the
    two).
    """
    return f"NIBBLE_{name.upper()}"
