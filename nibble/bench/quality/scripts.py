"""What a model writes to call tools, in the form of each tool parser that recipes name.

A scripted answer is the text of a model that calls given functions. A parser is right when it
returns these calls, from the whole text and from a stream cut anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 40},
                    "days": {"type": "integer"},
                    "metric": {"type": "boolean"},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "description": "Write a text file",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "maxLength": 40},
                    "text": {"type": "string", "maxLength": 120},
                },
                "required": ["path", "text"],
            },
        },
    },
)


@dataclass(frozen=True)
class Call:
    """A call of a function."""

    name: str
    arguments: Mapping[str, Any]


Script = tuple[Call, ...]
SCRIPTS: Mapping[str, Script] = {
    "one call": (Call("get_weather", {"city": "Oslo", "days": 3}),),
    "boolean": (Call("get_weather", {"city": "Oslo", "metric": True}),),
    "two calls": (
        Call("get_weather", {"city": "Oslo", "days": 3}),
        Call("get_weather", {"city": "Lima", "days": 1}),
    ),
    "lines and quotes": (
        Call("write_file", {"path": "a.py", "text": 'print("a")\nif 1 > 0:\n    x = [1]'}),
    ),
    "other scripts": (Call("get_weather", {"city": "Zürich 杭州 🌧"}),),
    "no call": (),
}
PLAIN = "It rains in Oslo: 3 < 5 and 2 > 1."  # the answer of a script without calls


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    """A value as forms in XML hold it: strings bare, anything else as JSON."""
    return value if isinstance(value, str) else _json(value)


def _hermes(calls: Script) -> str:
    texts = (_json({"name": call.name, "arguments": dict(call.arguments)}) for call in calls)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def _llama3_json(calls: Script) -> str:
    return "; ".join(
        _json({"name": call.name, "parameters": dict(call.arguments)}) for call in calls
    )


def _mistral(calls: Script) -> str:
    return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{_json(call.arguments)}" for call in calls)


def _each(calls: Script, argument: Callable[[str, Any], str]) -> list[tuple[str, str]]:
    """(name, all arguments) of each call."""
    return [
        (call.name, "".join(argument(key, value) for key, value in call.arguments.items()))
        for call in calls
    ]


def _qwen3(calls: Script) -> str:
    def argument(key: str, value: Any) -> str:
        return f"<parameter={key}>\n{_text(value)}\n</parameter>\n"

    return "\n".join(
        f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"
        for name, given in _each(calls, argument)
    )


def _deepseek_v4(calls: Script) -> str:
    mark = "｜DSML｜"

    def argument(key: str, value: Any) -> str:
        is_text = "true" if isinstance(value, str) else "false"
        start = f'<{mark}parameter name="{key}" string="{is_text}">'
        return f"{start}{_text(value)}</{mark}parameter>\n"

    inside = "".join(
        f'<{mark}invoke name="{name}">\n{given}</{mark}invoke>\n'
        for name, given in _each(calls, argument)
    )
    return f"<{mark}tool_calls>\n{inside}</{mark}tool_calls>"


def _gemma4(calls: Script) -> str:
    def argument(value: Any) -> str:
        return f'<|"|>{value}<|"|>' if isinstance(value, str) else _json(value)

    return "".join(
        f"<|tool_call>call:{call.name}{{"
        + ",".join(f"{key}:{argument(value)}" for key, value in call.arguments.items())
        + "}<tool_call|>"
        for call in calls
    )


def _glm(separator: str) -> Callable[[Script], str]:
    def argument(key: str, value: Any) -> str:
        return f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"

    def render(calls: Script) -> str:
        return "\n".join(
            f"<tool_call>{name}{separator}{given}</tool_call>"
            for name, given in _each(calls, argument)
        )

    return render


def _hy_v3(calls: Script) -> str:
    def argument(key: str, value: Any) -> str:
        return f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"

    inside = "".join(
        f"<tool_call>{name}<tool_sep>\n{given}</tool_call>\n"
        for name, given in _each(calls, argument)
    )
    return f"<tool_calls>\n{inside}</tool_calls>"


def _minimax_m2(calls: Script) -> str:
    def argument(key: str, value: Any) -> str:
        return f'<parameter name="{key}">{_text(value)}</parameter>\n'

    inside = "".join(
        f'<invoke name="{name}">\n{given}</invoke>\n' for name, given in _each(calls, argument)
    )
    return f"<minimax:tool_call>\n{inside}</minimax:tool_call>"


def _minimax_m3(calls: Script) -> str:
    mark = "]<]minimax[>["

    def argument(key: str, value: Any) -> str:
        return f"{mark}<{key}>{_text(value)}{mark}</{key}>"

    inside = "".join(
        f'{mark}<invoke name="{name}">{given}{mark}</invoke>\n'
        for name, given in _each(calls, argument)
    )
    return f"{mark}<tool_call>\n{inside}{mark}</tool_call>"


def _inkling(calls: Script) -> str:
    texts = (_json({"name": call.name, "args": dict(call.arguments)}) for call in calls)
    begin = "<|message_model|><|content_invoke_tool_json|>"
    return "".join(f"{begin}{text}<|end_message|>" for text in texts)


def _kimi_k2(calls: Script) -> str:
    inside = "".join(
        f"<|tool_call_begin|>functions.{call.name}:{place}<|tool_call_argument_begin|>"
        f"{_json(call.arguments)}<|tool_call_end|>"
        for place, call in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


def _muse_glimmer(calls: Script) -> str:
    def argument(key: str, value: Any) -> str:
        return f'<atem:parameter name="{key}">{_text(value)}</atem:parameter>\n'

    return "<|start|>assistant".join(
        f' to=functions.{name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n'
        f"{given}</atem:invoke>\n</atem:function_calls><|eom|>"
        for name, given in _each(calls, argument)
    )


FORMS: Mapping[str, Callable[[Script], str]] = {
    "deepseek_v4": _deepseek_v4,
    "gemma4": _gemma4,
    "glm47": _glm("\n"),
    "hermes": _hermes,
    "hy_v3": _hy_v3,
    "inkling": _inkling,
    "kimi_k2": _kimi_k2,
    "llama3_json": _llama3_json,
    "minimax_m2": _minimax_m2,
    "minimax_m3": _minimax_m3,
    "mistral": _mistral,
    "muse_glimmer": _muse_glimmer,
    "poolside_v1": _glm("\n"),
    "qwen3_coder": _qwen3,
    "qwen3_xml": _qwen3,
    "step3p5": _qwen3,
}
# vLLM reads gpt-oss by token ids with openai_harmony, whose vocabulary is a download.
WITHOUT_SCRIPTS: Mapping[str, str] = {"openai": "Harmony's vocabulary is not on this machine"}
# Tokens that are one id in the vocabularies of these models.
TOKENS: Sequence[str] = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"),
    *("[CALL_ID]", "[THINK]", "[/THINK]", "<|python_tag|>", "<|im_start|>", "<|im_end|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_sep>"),
    *("<tool_calls>", "</tool_calls>", "<minimax:tool_call>", "</minimax:tool_call>"),
    *("｜DSML｜", "]<]minimax[>[", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>"),
    *("<channel|>", "<|message_model|>", "<|content_text|>", "<|content_thinking|>"),
    *("<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>"),
    *("<|content_model_end_sampling|>", "<|end_message|>", "<|tool_calls_section_begin|>"),
    *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
)


def answer_of(parser: str, calls: Script) -> str:
    """What a model writes. Pure."""
    if calls:
        return FORMS[parser](calls)
    wraps = {
        "inkling": f"<|message_model|><|content_text|>{PLAIN}<|end_message|>",
        "muse_glimmer": f" to=user<|message|>{PLAIN}<|eot|>",
    }
    return wraps.get(parser, PLAIN)
