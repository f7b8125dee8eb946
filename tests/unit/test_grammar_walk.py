"""What the worker makes of a compiled grammar's masks and of errors, without a compiler."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from nibble.engine.guard import grammar_compile
from nibble.engine.guard.grammar_compile import (
    OutOfMemory,
    Refusal,
    reason_of,
    refusal_of,
    some_token,
    walk,
)


class Row:
    def __init__(self, words: list[int]) -> None:
        self.words = words

    def tolist(self) -> list[int]:
        return self.words


class Grammar:
    """Follows `masks`, one a token, then ends."""

    def __init__(self, masks: list[list[int]], slow_at: int = -1) -> None:
        self.masks, self.slow_at, self.tokens = masks, slow_at, list[int]()

    def is_terminated(self) -> bool:
        return len(self.tokens) == len(self.masks)

    def fill_bitmask(self, mask: list[Row], index: int) -> None:
        mask[index] = Row(self.masks[len(self.tokens)])
        if len(self.tokens) == self.slow_at:
            until = time.thread_time() + grammar_compile.MASK_SECONDS * 1.5
            while time.thread_time() < until:
                pass

    def accept_tokens(self, _: str, tokens: list[int]) -> bool:
        self.tokens += tokens
        return True


def walked(grammar: Grammar) -> list[int]:
    walk(grammar, [Row([])])
    return grammar.tokens


def test_a_grammar_is_followed_to_its_end() -> None:
    assert walked(Grammar([[0, 1 << 3], [1 << 31, 0], [-(1 << 31)]])) == [35, 31, 31]


def test_no_more_tokens_than_the_limit_are_tried() -> None:
    assert len(walked(Grammar([[6]] * 1000))) == grammar_compile.STEPS


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar([[0, 0]]), "It allows no token at all."),
        (Grammar([[1], [1], [0]]), "It allows no token after the first 2."),
        (Grammar([[1], [1]], slow_at=1), "Its mask for token 2 takes"),
    ],
    ids=["none", "none after two", "slow"],
)
def test_a_grammar_that_stalls_is_refused(grammar: Grammar, reason: str) -> None:
    with pytest.raises(Refusal, match=reason):
        walked(grammar)


def test_a_token_that_the_mask_allows() -> None:
    chance = random.Random(1)
    words = [0, -1, 0, 5]
    found = {some_token(words, chance) for _ in range(500)}
    assert found == {*range(32, 64), 96, 98}


class Model(BaseModel):
    n: int


def _validation_error() -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        Model.model_validate({"n": "x" * 10000})
    return caught.value


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RecursionError("maximum"), "It nests or refers to itself too deeply."),
        (
            ValueError("[07:27:56] /project/cpp/regex_converter.cc:83: Regex parsing error\nmore"),
            "Regex parsing error",
        ),
        (
            ValueError("but none are specified: {'json': None, 'regex': None}"),
            "but none are specified",
        ),
        (AttributeError("'str' object"), "Its shape is wrong (AttributeError: 'str' object)."),
        (AssertionError(), "Its shape is wrong (AssertionError: )."),
    ],
    ids=["recursion", "xgrammar", "echo", "attribute", "assertion"],
)
def test_reasons(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


def test_a_reason_repeats_no_input() -> None:
    reason = reason_of(_validation_error())
    assert reason.startswith("n: Input should be a valid integer")
    assert len(reason) < 120
    assert len(reason_of(ValueError("y" * 10**6))) < 420


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("std::bad_alloc")])
def test_out_of_memory_is_told_from_a_wrong_grammar(error: Any) -> None:
    assert isinstance(refusal_of(error), OutOfMemory)
    assert isinstance(refusal_of(ValueError("wrong")), Refusal)
