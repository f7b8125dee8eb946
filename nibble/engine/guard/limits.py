"""The limits of a request, which the gate inside vLLM reads from its environment."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

TEXT_BODY_BYTES = 32 << 20
SMALL_BYTES = 2048
_SMALL_MESSAGES = SMALL_BYTES // 3  # the shortest message takes 3 bytes: "{},"
BODIES_AT_A_TIME = 8  # bodies of max_body_bytes that fit into the default of max_buffered_bytes


@dataclass(frozen=True)
class RequestLimits:
    """The options of the group "Requests" with their names and defaults.

    None: the limit follows from the model (fields.ModelFacts).
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
        """The limits that the plan put into the environment (nibble/plan/guard_limits.py)."""
        values = {
            field.name: int(environ[variable_of(field.name)])
            for field in fields(cls)
            if environ.get(variable_of(field.name))
        }
        limits = cls(**values)
        buffered = limits.max_buffered_bytes or BODIES_AT_A_TIME * limits.max_body_bytes
        return replace(limits, max_buffered_bytes=buffered)


def variable_of(name: str) -> str:
    """The environment variable of the field `name`. It has the name of the option's variable."""
    return f"NIBBLE_{name.upper()}"
