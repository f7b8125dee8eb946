"""Calls of tools and compact JSON: what the plan sets by a chat template, a recipe and the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nibble.checkpoint.chat_template import chat_template
from nibble.checkpoint.gguf.check import render
from nibble.hub.packaged import SMOLLM2
from nibble.plan.applications import compact_json_flags, tool_flags, tool_parser_of
from nibble.plan.choice import Choice, Flags, Layer

# What the templates of these families say of calls.
QWEN3 = """{%- if tools %}{{- "<tools>" }}return a json object with function name and arguments \
within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \
\\"arguments\\": <args-json-object>}\\n</tool_call>"""
QWEN3_CODER = """{%- if tools %}<tool_call>\\n<function=example_function_name>\\n\
<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n</function>\\n</tool_call>"""
LLAMA31 = """{%- if tools %}Respond in the format {"name": function name, "parameters": \
dictionary of argument name and its value}. Do not use variables."""
MISTRAL = "{%- if tools %}[AVAILABLE_TOOLS] [/AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] ["
GLM = "{%- if tools %}<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key></tool_call>"
CHATML = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (QWEN3, "hermes"),
        (QWEN3_CODER, "qwen3_coder"),
        (LLAMA31, "llama3_json"),
        (MISTRAL, "mistral"),
        (GLM, None),
        (CHATML, None),
        (QWEN3 + LLAMA31, None),  # two forms
        ("", None),
    ],
)
def test_the_parser_is_that_of_the_form_that_the_template_names(
    template: str, parser: str | None
) -> None:
    assert tool_parser_of(template) == parser


def test_both_flags_or_none() -> None:
    flags = tool_flags(QWEN3, Flags())
    assert {name: choice.value for name, choice in flags.items()} == {
        "--enable-auto-tool-choice": True,
        "--tool-call-parser": "hermes",
    }
    assert all(choice.reason for choice in flags.values())
    assert tool_flags(CHATML, Flags()) == {}


@pytest.mark.parametrize(
    "flag",
    ["--tool-call-parser", "--enable-auto-tool-choice", "--chat-template", "--tokenizer-mode"],
)
def test_any_layer_that_says_something_of_tools_wins(flag: str) -> None:
    given = Flags().add({flag: Choice("x", "recipe", "", Layer.RECIPE)})
    assert tool_flags(QWEN3, given) == {}


def compact(layer: Layer) -> Flags:
    value = {"nibble": {"compact_json": "on"}}
    return Flags().add({"--additional-config": Choice(value, "ours", "", layer)})


def structured(layer: Layer, **value: Any) -> dict[str, Choice]:
    return {"--structured-outputs-config": Choice(value, "theirs", "", layer)}


def test_a_users_flag_for_blanks_wins_over_the_recipe() -> None:
    flags = compact(Layer.RECIPE).add(structured(Layer.COMMAND_LINE, disable_any_whitespace=False))
    final = flags.add(compact_json_flags(flags))
    assert final["--additional-config"].value == {"nibble": {"compact_json": "off"}}
    assert "--structured-outputs-config decides" in final["--additional-config"].reason


def test_another_key_of_that_flag_changes_nothing() -> None:
    flags = compact(Layer.RECIPE).add(structured(Layer.COMMAND_LINE, backend="guidance"))
    assert compact_json_flags(flags) == {}
    assert compact_json_flags(Flags()) == {}


def test_a_users_option_wins_over_a_lower_layers_flag() -> None:
    flags = compact(Layer.COMMAND_LINE).add(structured(Layer.RECIPE, disable_any_whitespace=False))
    assert compact_json_flags(flags) == {}


# --- where a template is --------------------------------------------------------------------------


def test_the_template_of_a_folder(tmp_path: Path) -> None:
    assert chat_template(tmp_path) == ""
    config = tmp_path / "tokenizer_config.json"
    config.write_text("{")
    assert chat_template(tmp_path) == ""
    config.write_text(json.dumps({"chat_template": CHATML}))
    assert chat_template(tmp_path) == CHATML
    several = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": QWEN3}]
    config.write_text(json.dumps({"chat_template": several}))
    assert chat_template(tmp_path) == QWEN3
    (tmp_path / "chat_template.jinja").write_text(LLAMA31)
    assert chat_template(tmp_path) == LLAMA31


# --- the default model's template -----------------------------------------------------------------

# As the package's GGUF file has it.
ORIGINAL = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
TEMPLATE = (SMOLLM2.extras() / "chat_template.jinja").read_text()
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
ASSISTANT = {"role": "assistant", "content": "Good day"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize(
    "messages",
    [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER], [SYSTEM, USER, ASSISTANT], [SYSTEM], []],
)
def test_without_tools_it_renders_as_the_original(messages: list[Any], asks: bool) -> None:
    ours, theirs = (
        render(template, messages=messages, add_generation_prompt=asks)
        for template in (TEMPLATE, ORIGINAL)
    )
    assert ours == theirs


def test_with_tools_it_has_the_tools_the_calls_and_their_answers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "17 degrees"},
    ]
    (text,), _ = render_jinja_template(
        [messages], tools=[TOOL], chat_template=TEMPLATE, add_generation_prompt=True
    )
    assert "trained by Hugging Face\n\nYou may call" in text
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text
    called = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{called}<|im_end|>" in text
    answered = "<tool_response>\n17 degrees\n</tool_response>"
    assert f"<|im_start|>user\n{answered}<|im_end|>\n<|im_start|>assistant\n" in text


# --- the plugin -----------------------------------------------------------------------------------


@pytest.mark.vllm
def test_schemas_of_json_in_a_structural_tag_get_a_bound_of_blanks() -> None:
    from nibble.engine.plugin.compact_json import without_blanks

    schema = {"type": "json_schema", "properties": {"type": {"type": "json_schema"}}}
    json_format = {"type": "json_schema", "json_schema": schema}
    xml_format = {"type": "json_schema", "json_schema": schema, "style": "qwen_xml"}
    tag = {
        "type": "structural_tag",
        "format": {"type": "or", "elements": [json_format, xml_format]},
    }
    changed = json.loads(without_blanks(json.dumps(tag)))
    one, other = changed["format"]["elements"]
    assert one == json_format | {"max_whitespace_cnt": 1}
    assert other == xml_format
