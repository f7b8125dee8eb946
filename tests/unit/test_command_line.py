"""Words after `nibble serve`: the model, nibble's options, any flag of vLLM."""

from __future__ import annotations

import pytest

from nibble.engine.schema import load_schema
from nibble.errors import ExitCode, NibbleError
from nibble.settings.command_line import read_command_line

SCHEMA = load_schema()


@pytest.mark.parametrize(
    ("words", "values", "flags"),
    [
        (["a/b"], {"model": "a/b"}, {}),
        (
            ["a/b", "--port", "9000", "--kv-cache-dtype", "fp8"],
            {"model": "a/b", "port": "9000"},
            {"--kv-cache-dtype": "fp8"},
        ),
        (
            ["--max_model_len=32K", "-tp", "2"],
            {"max_model_len": "32K", "tensor_parallel_size": "2"},
            {},
        ),
        (["a/b", "--tq", "--debug"], {"model": "a/b", "tq": "turboquant_k8v4", "debug": "1"}, {}),
        (["a/b", "--tq", "turboquant_3bit_nc"], {"model": "a/b", "tq": "turboquant_3bit_nc"}, {}),
        (
            ["a/b", "--tq=4bit_nc", "--enforce-eager"],
            {"model": "a/b", "tq": "4bit_nc"},
            {"--enforce-eager": True},
        ),
        (["a/b", "--", "--kv-cache-dtype", "fp8"], {"model": "a/b"}, {"--kv-cache-dtype": "fp8"}),
        (["a/b", "--seed", "-1"], {"model": "a/b"}, {"--seed": "-1"}),
    ],
)
def test_words_become_options_and_flags(
    words: list[str], values: dict[str, str], flags: dict[str, object]
) -> None:
    read = read_command_line(words, ("--json",), SCHEMA)
    assert (dict(read.values), read.flags, read.rest) == (values, flags, frozenset())


def test_the_switches_of_a_command_are_its_own() -> None:
    assert read_command_line(["a/b", "--json"], ("--json",), SCHEMA).rest == {"--json"}


def test_an_option_without_its_value_is_a_usage_error() -> None:
    with pytest.raises(NibbleError) as caught:
        read_command_line(["a/b", "--port"], (), SCHEMA)
    assert caught.value.code == ExitCode.USAGE


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "9000", "a/b"],
        ["--enforce-eager", "a/b"],
        ["a/b", "--seed", "1", "c/d"],
        ["a/b", "c/d"],
    ],
)
def test_a_model_after_the_flags_or_a_second_one_is_refused_with_its_place(
    words: list[str],
) -> None:
    with pytest.raises(
        NibbleError, match=f"'{words[-1]}' where a flag .* write MODEL, once, before the flags"
    ):
        read_command_line(words, (), SCHEMA)


@pytest.mark.parametrize(
    "flag", ["--middleware", "--api-key", "--uds", "--shutdown-timeout", "--kv-cache-memory-bytes"]
)
def test_flags_nibble_owns_are_refused_on_the_command_line_too(flag: str) -> None:
    with pytest.raises(NibbleError) as caught:
        read_command_line(["a/b", flag, "1"], (), SCHEMA)
    assert caught.value.code == ExitCode.CONFIG


def test_a_commands_own_switches_may_come_before_the_model() -> None:
    found = read_command_line(
        ["--json", "acme/m", "--port", "9000"], ("--json", "--detach"), load_schema()
    )
    assert (found.values, found.rest) == ({"model": "acme/m", "port": "9000"}, {"--json"})
