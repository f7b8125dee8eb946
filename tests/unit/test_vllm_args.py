"""Flags of `vllm serve` as values."""

from __future__ import annotations

import pytest

from nibble.engine.flags import OWNED, merge, read_flags, split_words, write_flag
from nibble.engine.schema import load_schema
from nibble.errors import ExitCode, NibbleError
from tests.support.refusals import refusal_of

SCHEMA = load_schema()


def read(text: str) -> dict[str, object]:
    return read_flags(split_words(text, "VLLM_EXTRA_ARGS"), "VLLM_EXTRA_ARGS", SCHEMA)


def failure(text: str) -> NibbleError:
    return refusal_of(lambda: read(text), ExitCode.CONFIG)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("--kv-cache-dtype fp8", {"--kv-cache-dtype": "fp8"}),
        ("--kv_cache_dtype=fp8", {"--kv-cache-dtype": "fp8"}),
        ("-tp 2", {"--tensor-parallel-size": "2"}),
        ("--enforce-eager --max-num-seqs 4", {"--enforce-eager": True, "--max-num-seqs": "4"}),
        ("--no-enable-prefix-caching", {"--enable-prefix-caching": False}),
        ("--seed -1", {"--seed": "-1"}),
        (
            """--speculative-config '{"method": "mtp", "num_speculative_tokens": 2}'""",
            {"--speculative-config": {"method": "mtp", "num_speculative_tokens": 2}},
        ),
        (
            "--speculative-config.num_speculative_tokens 2",
            {"--speculative-config": {"num_speculative_tokens": 2}},
        ),
        (
            "--compilation-config.cudagraph_mode=NONE",
            {"--compilation-config": {"cudagraph_mode": "NONE"}},
        ),
        ("-O3", {"--optimization-level": "3"}),
    ],
)
def test_flags_are_read_as_vllm_reads_them(text: str, flags: dict[str, object]) -> None:
    assert read(text) == flags


def test_json_with_spaces_survives() -> None:
    flags = read("""--limit-mm-per-prompt '{"image": 0, "video": 0}' --enforce-eager""")
    assert flags == {"--limit-mm-per-prompt": {"image": 0, "video": 0}, "--enforce-eager": True}


def test_dotted_flags_join_the_json_of_the_same_flag() -> None:
    flags = read(
        """--speculative-config '{"method": "mtp"}' --speculative-config.num_speculative_tokens 3"""
    )
    assert flags == {"--speculative-config": {"method": "mtp", "num_speculative_tokens": 3}}


@pytest.mark.parametrize("text", ["--a 'b", '--a "b', '--speculative-config \'{"method": "mtp"\''])
def test_unbalanced_quotes_and_broken_json_are_refused(text: str) -> None:
    failure(text)


@pytest.mark.parametrize("flag", OWNED)
def test_a_flag_nibble_owns_is_refused_naming_what_to_use(flag: str) -> None:
    error = failure(f"{flag} 1")
    assert OWNED[flag] in error.line()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("--max-modle-len 5", "--max-model-len"),
        ("--moe-backend martin", "marlin"),
        ("--compilation-config.cudagraph_mod NONE", "cudagraph_mod"),
        ("--attention-config '{\"use_fp4_indexer_cache\": true}'", "use_fp4_indexer_cache"),
        ("--max-num-seqs many", "--max-num-seqs"),
        ("serve", "serve"),
        ("--max-num-seqs", "--max-num-seqs"),
        ("--attention-backend CUTE_PAGED", "CuTe"),
    ],
)
def test_what_vllm_does_not_know_is_refused_before_it_starts(text: str, named: str) -> None:
    assert named in failure(text).line()


def test_objects_merge_key_by_key_at_every_depth() -> None:
    low = {"a": {"b": 1, "c": {"d": 1}}, "e": 1}
    assert merge(low, {"a": {"c": {"f": 2}}, "e": {"g": 3}}) == {
        "a": {"b": 1, "c": {"d": 1, "f": 2}},
        "e": {"g": 3},
    }


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("--enforce-eager", True, ["--enforce-eager"]),
        ("--enable-prefix-caching", False, ["--no-enable-prefix-caching"]),
        ("--max-model-len", 32768, ["--max-model-len", "32768"]),
        ("--served-model-name", ["a", "default"], ["--served-model-name", "a", "default"]),
        ("--speculative-config", {"method": "mtp"}, ["--speculative-config", '{"method":"mtp"}']),
    ],
)
def test_flags_are_written_so_that_they_read_back(
    name: str, value: object, words: list[str]
) -> None:
    assert write_flag(name, value) == words
