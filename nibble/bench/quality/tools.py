"""Tool calls and structured answers of a running server: a request and a check for each case."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nibble.bench.quality.outcome import Outcome
from nibble.bench.quality.scripts import SCRIPTS, TOOLS
from nibble.bench.served import Served, reason_of
from nibble.errors import ExitCode, NibbleError
from nibble.serve.endpoint import Endpoint

TIMEOUT_S = 300.0
_MAX_TOKENS = 256
_QUESTION = {"role": "user", "content": "What is the weather in Oslo for the next 3 days?"}
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "is_member": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "is_member", "tags"],
    "additionalProperties": False,
}
_HISTORY = (
    _QUESTION,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 3}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": '{"forecast": "rain, 8 degrees"}'},
)


@dataclass(frozen=True)
class Message:
    """An answer, whole or put together from a stream."""

    content: str
    calls: Sequence[tuple[str, str]]
    ids: Sequence[str]
    finish: str


Check = Callable[[Message], str]


@dataclass(frozen=True)
class Case:
    """A request, and a check that returns what is wrong, or nothing."""

    name: str
    body: Mapping[str, Any]
    check: Check


def cases(with_tools: bool) -> list[Case]:
    """All cases for a server that takes tools, or does not. Pure."""
    return [*_structured(), *((*_choices(), *_scripted()) if with_tools else ())]


def _structured() -> Iterator[Case]:
    def ask(text: str, **more: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}], **more}

    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON}}
    yield Case("JSON by a schema", ask("Describe a person.", response_format=schema), _is_person)
    yield Case(
        "an answer of a list",
        ask("Is rain wet?", structured_outputs={"choice": ["yes", "no"]}),
        lambda found: "" if found.content in ("yes", "no") else f"it is {found.content!r}",
    )
    yield Case(
        "an answer by a regular expression",
        ask("A date, please.", structured_outputs={"regex": r"20\d\d-[01]\d-[0-3]\d"}),
        lambda found: (
            "" if re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", found.content) else found.content[:80]
        ),
    )


def _choices() -> Iterator[Case]:
    tools = list(TOOLS)
    named = {"type": "function", "function": {"name": "get_weather"}}
    base = {"messages": [_QUESTION], "tools": tools}
    yield Case("tools, auto", {**base, "tool_choice": "auto"}, _calls_weather)
    yield Case("tools, required", {**base, "tool_choice": "required"}, _calls)
    yield Case("tools, a named one", {**base, "tool_choice": named}, _calls_weather)
    yield Case("tools, none", {**base, "tool_choice": "none"}, _calls_nothing)
    yield Case("30 tools and a long prompt, a named one",
               {"messages": [{"role": "system", "content": "Use the tools. " * 60}, _QUESTION],
                "tools": [*tools, *_more_tools(28)], "tool_choice": named},
               _calls_weather)  # fmt: skip
    yield Case("a tool's result", {"messages": list(_HISTORY), "tools": tools}, _answers)


def _more_tools(count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        schema = {"type": "object", "properties": {"value": {"type": "number"}}}
        function = {"name": f"tool_{number}", "description": "Does a thing", "parameters": schema}
        yield {"type": "function", "function": function}


def _scripted() -> Iterator[Case]:
    """Schemas that leave one answer: the model writes it in its parser's form, and the server must
    find exactly this call.
    """
    for name, script in SCRIPTS.items():
        if len(script) != 1:
            continue
        wanted = (script[0].name, dict(script[0].arguments))

        def check(found: Message, wanted: tuple[str, Any] = wanted) -> str:
            return _calls(found) or next(
                (
                    f"it calls {name} with {text[:120]}"
                    for name, text in found.calls
                    if (name, json.loads(text)) != wanted
                ),
                "",
            )

        body = {
            "messages": [{"role": "user", "content": "Call the tool."}],
            "tools": [_fixed_tool(*wanted)],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        yield Case(f"scripted, {name}", body, check)


def _fixed_tool(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A tool that takes these arguments only."""
    schema = {
        "type": "object",
        "properties": {key: _fixed(value) for key, value in arguments.items()},
        "required": list(arguments),
        "additionalProperties": False,
    }
    function = {"name": name, "description": "A tool", "parameters": schema, "strict": True}
    return {"type": "function", "function": function}


def _fixed(value: Any) -> dict[str, Any]:
    kinds = {str: "string", bool: "boolean", int: "integer"}
    return {"type": kinds[type(value)], "enum": [value]}


def _is_person(found: Message) -> str:
    try:
        person = json.loads(found.content)
    except ValueError:
        return f"not JSON: {found.content[:80]!r}"
    kinds = {"name": str, "age": int, "is_member": bool, "tags": list}
    is_right = isinstance(person, dict) and person.keys() == kinds.keys()
    if not is_right or not all(isinstance(person[key], kind) for key, kind in kinds.items()):
        return f"not by the schema: {found.content[:80]!r}"
    return ""


def _calls(found: Message) -> str:
    """Whether every call is of a known tool, with JSON that has what it requires."""
    if not found.calls:
        return f"no call; it says {found.content[:80]!r}"
    if len(set(found.ids)) != len(found.calls) or not all(found.ids):
        return f"ids of calls are {list(found.ids)}"
    required = {
        tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in TOOLS
    }
    for name, text in found.calls:
        try:
            given = json.loads(text)
        except ValueError:
            return f"arguments of {name} are not JSON: {text[:80]!r}"
        if name not in required:
            return f"an unknown tool {name!r}"
        if not isinstance(given, dict) or any(key not in given for key in required[name]):
            return f"arguments of {name} lack one that it requires: {text[:80]!r}"
    return ""


def _calls_weather(found: Message) -> str:
    names = {name for name, _ in found.calls}
    return _calls(found) or ("" if names == {"get_weather"} else f"it calls {sorted(names)}")


def _calls_nothing(found: Message) -> str:
    return f"it calls {found.calls[0][0]}" if found.calls else ""


def _answers(found: Message) -> str:
    return "" if found.content.strip() or found.calls else "an empty answer"


def run_cases(
    endpoint: Endpoint, served: Served, todo: Sequence[Case], tell: Callable[[str], None]
) -> list[Outcome]:
    """Each case whole and streamed. OSError without an answer."""
    outcomes = []
    for case in todo:
        for streams in (False, True):
            name = f"{case.name}, {'streamed' if streams else 'whole'}"
            tell(name)
            try:
                reason = case.check(ask(endpoint, served, case.body, streams))
            except NibbleError as error:
                reason = error.what
            outcomes.append(Outcome(name, not reason, reason))
    return outcomes


def has_tools(endpoint: Endpoint, served: Served) -> bool:
    """Whether the server takes tools with `auto`."""
    body = {"messages": [_QUESTION], "tools": list(TOOLS), "tool_choice": "auto", "max_tokens": 1}
    status, answer = _post(endpoint, served, body)
    return not (status == 400 and b"tool" in answer)


def ask(endpoint: Endpoint, served: Served, body: Mapping[str, Any], streams: bool) -> Message:
    """The answer. Raises CONFIG where it is not one, OSError without an answer."""
    status, answer = _post(endpoint, served, {"max_tokens": _MAX_TOKENS, **body}, streams)
    if status in (429, 503):
        raise ConnectionError(f"status {status}: {reason_of(answer)}")
    try:
        if status != 200:
            raise ValueError(f"status {status}: {reason_of(answer)}")
        return read_stream(answer) if streams else read_whole(json.loads(answer))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise NibbleError(ExitCode.CONFIG, what=str(error)[:200], action="see the log") from None


def _post(
    endpoint: Endpoint, served: Served, body: Mapping[str, Any], streams: bool = False
) -> tuple[int, bytes]:
    whole = {"model": served.name, "temperature": 0, "stream": streams, **body}
    return endpoint.call("/v1/chat/completions", whole, TIMEOUT_S)


def read_whole(answer: Mapping[str, Any]) -> Message:
    """Of an answer that is not a stream. Pure."""
    choice = answer["choices"][0]
    message = choice["message"]
    calls = message.get("tool_calls") or ()
    return Message(
        message.get("content") or "",
        [(one["function"]["name"], one["function"]["arguments"]) for one in calls],
        [one["id"] for one in calls],
        str(choice["finish_reason"]),
    )


def read_stream(answer: bytes) -> Message:
    """Of server-sent events. Raises ValueError where the end is missing. Pure."""
    lines = [
        line.removeprefix("data: ")
        for line in answer.decode().splitlines()
        if line.startswith("data: ")
    ]
    if not lines or lines[-1] != "[DONE]":
        raise ValueError("the stream has no end")
    content, finish = "", ""
    calls: dict[int, list[str]] = {}
    for line in lines[:-1]:
        piece = json.loads(line)
        if "error" in piece:
            raise ValueError(f"an error in the stream: {piece['error'].get('message')}")
        for choice in piece["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            finish = choice.get("finish_reason") or finish
            for call in delta.get("tool_calls") or ():
                known = calls.setdefault(call["index"], ["", "", ""])
                function = call.get("function") or {}
                known[0] += call.get("id") or ""
                known[1] += function.get("name") or ""
                known[2] += function.get("arguments") or ""
    order = [calls[at] for at in sorted(calls)]
    return Message(content, [(one[1], one[2]) for one in order], [one[0] for one in order], finish)
