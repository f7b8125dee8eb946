"""The limits of a request, as the gate inside vLLM reads them from its environment."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

TEXT_BODY_BYTES = 32 << 20
SMALL_BYTES = 2048
_SMALL_MESSAGES = SMALL_BYTES // 3  # "{},"
BODIES_AT_A_TIME = 8


@dataclass(frozen=True)
class RequestLimits:
    """Options of the group "Requests" (settings.py) under their own names; None: the gate asks the model."""

    max_body_bytes: int
    max_buffered_bytes: int
    head_seconds: int
    body_gap_seconds: int
    body_seconds: int
    max_connections: int
    max_connections_per_address: int
    max_json_depth: int
    max_json_keys: int
    max_json_items: int | None
    max_messages: int
    max_sequences: int
    max_text_chars: int | None
    max_logprob_entries: int
    grammar_seconds: int
    grammar_memory_mib: int
    grammar_bytes: int

    @functools.cached_property
    def allow_small_bodies(self) -> bool:
        """Whether no body of SMALL_BYTES can have too many messages or too much text."""
        return self.max_messages >= _SMALL_MESSAGES and (self.max_text_chars or SMALL_BYTES) >= SMALL_BYTES

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> RequestLimits:
        """What the plan put there (plan_limits.py); the defaults elsewhere."""
        from nibble.settings import default_of, options  # pydantic: not before the gate is made

        known = options()
        values: dict[str, Any] = {}
        for field in fields(cls):
            given = environ.get(known[field.name].env[0])
            values[field.name] = int(given) if given else default_of(field.name)
        values["max_body_bytes"] = values["max_body_bytes"] or TEXT_BODY_BYTES
        values["max_buffered_bytes"] = (
            values["max_buffered_bytes"] or BODIES_AT_A_TIME * values["max_body_bytes"]
        )
        return cls(**values)
