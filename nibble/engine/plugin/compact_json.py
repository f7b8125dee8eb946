"""JSON without blanks between its values, in structured outputs and in calls of tools.

JSON allows any number of blanks there, and a small model may fill its answer with them up to its
token limit. vLLM 0.32 forbids them for two fixed backends alone (disable_any_whitespace,
config/structured_outputs.py:62). With a fixed backend it refuses schemas that `auto` passes on to
the next one (sampling_params.py:1393), and in calls of tools it allows blanks with any. The option
`compact_json` works with `auto` and with tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from nibble.engine.contract import Options
from nibble.engine.plugin.require import replace, required, required_of_instances


def forbid_blanks() -> None:
    """Replace methods of both backends that `auto` takes first. Raises VllmMismatch."""
    for backend in (XgrammarBackend, GuidanceBackend):
        required_of_instances(backend, "vllm_config", "disable_any_whitespace")
        _set_at_start(backend)
    compile_grammar = required(
        XgrammarBackend, "compile_grammar", "self", "request_type", "grammar_spec"
    )

    def compile_compact(
        self: Any, request_type: Any, grammar_spec: str, *rest: Any, **more: Any
    ) -> Any:
        if self.disable_any_whitespace and request_type == StructuredOutputOptions.STRUCTURAL_TAG:
            grammar_spec = without_blanks(grammar_spec)
        return compile_grammar(self, request_type, grammar_spec, *rest, **more)

    replace(XgrammarBackend, "compile_grammar", compile_compact)


def _set_at_start(backend: type) -> None:
    start = required(backend, "__post_init__", "self")

    def start_compact(self: Any) -> None:
        start(self)
        if Options.from_config(self.vllm_config.additional_config).compact_json == "on":
            self.disable_any_whitespace = True

    replace(backend, "__post_init__", start_compact)


def without_blanks(structural_tag: str) -> str:
    """The tag with at most one blank between the values of its schemas (xgrammar 0.2.8,
    structural_tag.py:64). What stands between schemas stays.
    """
    tag = json.loads(structural_tag)
    for part in _schemas(tag.get("format")):
        part["max_whitespace_cnt"] = 1  # its least value
    return json.dumps(tag)


def _schemas(part: Any) -> Iterator[dict[str, Any]]:
    """The formats of JSON by a schema; a client's schema is not searched for more."""
    if isinstance(part, dict):
        if part.get("type") == "json_schema":
            if part.get("style", "json") == "json":
                yield part
            return
        for value in part.values():
            yield from _schemas(value)
    elif isinstance(part, list):
        for value in part:
            yield from _schemas(value)
