"""Limits of a request (nibble/engine/guard)."""

from __future__ import annotations

from pydantic import BaseModel

from nibble.engine.guard.limits import RequestLimits
from nibble.settings.declare import option


class RequestsOptions(BaseModel):
    """The group `Requests`."""

    max_header_bytes: int = option(
        65536,
        "Requests",
        "Maximum bytes of a request's first line and headers; above it, nibble answers 431.",
        "NIBBLE_MAX_HEADER_BYTES",
        vllm="--h11-max-incomplete-event-size",
        expected="a whole number from 1024 to 16777216",
        ge=1024,
        le=1 << 24,
    )
    max_headers: int = option(
        128,
        "Requests",
        "Maximum headers of a request; above it, nibble answers 431.",
        "NIBBLE_MAX_HEADERS",
        vllm="--h11-max-header-count",
        expected="a whole number from 8 to 65536",
        ge=8,
        le=65536,
    )
    max_body_bytes: int | None = option(
        None,
        "Requests",
        "Maximum bytes of a request's body; above it, nibble answers 413. Default: 32 MiB, or"
        " 128 MiB if the model takes images, audio or video.",
        "NIBBLE_MAX_BODY_BYTES",
        expected="a whole number from 1024 to 17179869184",
        ge=1024,
        le=1 << 34,
    )
    max_buffered_bytes: int | None = option(
        None,
        "Requests",
        "Maximum bytes of all unanswered bodies in an API process; above it, a body over 64 KiB"
        " gets 503. Default: 8 times NIBBLE_MAX_BODY_BYTES.",
        "NIBBLE_MAX_BUFFERED_BYTES",
        expected="a whole number from 1024 to 1099511627776",
        ge=1024,
        le=1 << 40,
    )
    head_seconds: int = option(
        RequestLimits.head_seconds,
        "Requests",
        "Maximum seconds from a connection, or from a request's first byte, to the end of its"
        " headers; above it, nibble answers 408.",
        "NIBBLE_HEAD_SECONDS",
        expected="a whole number of seconds from 1 to 3600",
        ge=1,
        le=3600,
    )
    body_gap_seconds: int = option(
        RequestLimits.body_gap_seconds,
        "Requests",
        "Maximum seconds between two bytes of a body; above it, nibble answers 408.",
        "NIBBLE_BODY_GAP_SECONDS",
        expected="a whole number of seconds from 1 to 3600",
        ge=1,
        le=3600,
    )
    body_seconds: int = option(
        RequestLimits.body_seconds,
        "Requests",
        "Maximum seconds for a whole body; above it, nibble answers 408.",
        "NIBBLE_BODY_SECONDS",
        expected="a whole number of seconds from 1 to 86400",
        ge=1,
        le=86400,
    )
    max_connections: int = option(
        RequestLimits.max_connections,
        "Requests",
        "Maximum connections of an API process. Above it, nibble closes the oldest connection"
        " without a complete request; if all have one, the new connection gets 503.",
        "NIBBLE_MAX_CONNECTIONS",
        expected="a whole number from 8 to 65536",
        ge=8,
        le=65536,
    )
    max_connections_per_address: int = option(
        RequestLimits.max_connections_per_address,
        "Requests",
        "Maximum connections from one address to an API process; above it, nibble acts as for"
        " NIBBLE_MAX_CONNECTIONS.",
        "NIBBLE_MAX_CONNECTIONS_PER_ADDRESS",
        expected="a whole number from 1 to 65536",
        ge=1,
        le=65536,
    )
    max_json_depth: int = option(
        RequestLimits.max_json_depth,
        "Requests",
        "Maximum levels of nested arrays and objects in a body; above it, nibble answers 400.",
        "NIBBLE_MAX_JSON_DEPTH",
        expected="a whole number from 8 to 500",
        ge=8,
        le=500,
    )
    max_json_keys: int = option(
        RequestLimits.max_json_keys,
        "Requests",
        "Maximum keys of all objects in a body; above it, nibble answers 400.",
        "NIBBLE_MAX_JSON_KEYS",
        expected="a whole number from 100 to 10000000",
        ge=100,
        le=10**7,
    )
    max_json_items: int | None = option(
        None,
        "Requests",
        "Maximum commas and opening brackets in a body, outside its strings; above it, nibble"
        " answers 400. Default: 262144 (1048576 to embed or score) plus twice the context"
        " length.",
        "NIBBLE_MAX_JSON_ITEMS",
        expected="a whole number from 100 to 1000000000",
        ge=100,
        le=10**9,
    )
    max_messages: int = option(
        RequestLimits.max_messages,
        "Requests",
        "Maximum messages of a chat request; each part and tool call counts as one. Above it,"
        " nibble answers 400.",
        "NIBBLE_MAX_MESSAGES",
        expected="a whole number from 1 to 1000000",
        ge=1,
        le=10**6,
    )
    max_sequences: int = option(
        RequestLimits.max_sequences,
        "Requests",
        "Maximum sequences of a request: prompts times `n` (or `best_of`), or twice as many"
        " inputs to embed or score. Above it, nibble answers 400.",
        "NIBBLE_MAX_SEQUENCES",
        expected="a whole number from 1 to 1000000",
        ge=1,
        le=10**6,
    )
    max_text_chars: int | None = option(
        None,
        "Requests",
        "Maximum characters of all text in a body; above it, nibble answers 400. Default:"
        " 4194304, or 8 per token of context if that is larger.",
        "NIBBLE_MAX_TEXT_CHARS",
        expected="a whole number from 1024 to 17179869184",
        ge=1024,
        le=1 << 34,
    )
    max_logprob_entries: int = option(
        RequestLimits.max_logprob_entries,
        "Requests",
        "Maximum log-probs of a request: tokens times (`logprobs` + 1) times `n`; an entry of a"
        " chat counts 4. Above it, nibble answers 400.",
        "NIBBLE_MAX_LOGPROB_ENTRIES",
        expected="a whole number from 1000 to 1000000000",
        ge=1000,
        le=10**9,
    )
    grammar_seconds: int = option(
        RequestLimits.grammar_seconds,
        "Requests",
        "Maximum seconds of CPU time to compile a structured output, in a separate process;"
        " above it, nibble answers 400.",
        "NIBBLE_GRAMMAR_SECONDS",
        expected="a whole number of seconds from 1 to 60",
        ge=1,
        le=60,
    )
    grammar_memory_mib: int = option(
        RequestLimits.grammar_memory_mib,
        "Requests",
        "Maximum MiB of memory to compile a structured output; above it, nibble answers 400.",
        "NIBBLE_GRAMMAR_MEMORY_MIB",
        expected="a whole number of MiB from 16 to 65536",
        ge=16,
        le=65536,
    )
    grammar_bytes: int = option(
        RequestLimits.grammar_bytes,
        "Requests",
        "Maximum bytes of the schemas, grammars and tools of a request; above it, nibble"
        " answers 400.",
        "NIBBLE_GRAMMAR_BYTES",
        expected="a whole number from 1024 to 33554432",
        ge=1024,
        le=1 << 25,
    )
