"""`nibble soak` without a server: the verdict, drift, and what counts as an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from nibble.bench.drift import Scores, drift, read_scores
from nibble.bench.load import Counts, Failed, check_structured
from nibble.bench.verdict import GROWTH_BYTES, MIB, Sample, Soak, problems
from nibble.cli.soak import exit_code

GIB = 1 << 30


def samples(
    sizes: Sequence[int | None], pids: Sequence[int | None] | None = None
) -> tuple[Sample, ...]:
    return tuple(
        Sample(5.0 * place, size, pid, True)
        for place, (size, pid) in enumerate(zip(sizes, pids or [7] * len(sizes), strict=True))
    )


STEADY = Soak(
    seconds=600.0,
    done={"short": 100, "long": 50},
    failed={},
    refused={"short": 2},
    reasons={},
    left_out={},
    seeded_same=0.9,
    samples=samples([GIB] * 16),
    drifts=(0.0, 0.01),
    left_over=0,
)


def test_a_server_that_stays_as_it_was_is_steady() -> None:
    assert problems(STEADY) == [] and exit_code(STEADY) == 0
    assert STEADY.to_json()["verdict"] == "steady"


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"failed": {"long": 1}, "reasons": {"long: status 500": 1}},
            "1 requests failed: long: st",
        ),
        ({"refused": {"short": 151}}, "151 requests were refused"),
        ({"done": {}, "refused": {}}, "no request was answered"),
        ({"samples": samples([GIB] * 16, [7] * 8 + [9] * 8)}, "the engine was restarted (1)"),
        ({"samples": samples([GIB] * 12 + [2 * GIB] * 4)}, "memory grew by 1024 MiB to 2048 MiB"),
        ({"drifts": (0.0, 0.11)}, "moved by 0.110 nats"),
        ({"drifts": (float("inf"),)}, "moved by inf nats"),
        ({"left_over": 3}, "still held 3 requests"),
        ({"ended": "the server ended"}, "it ended early: the server ended"),
    ],
)
def test_each_fault_fails_the_verdict(changed: dict[str, Any], text: str) -> None:
    soak = replace(STEADY, **changed)
    assert len(problems(soak)) == 1 and text in problems(soak)[0]
    assert exit_code(soak) == 6 and soak.to_json()["verdict"] == "failed"


@pytest.mark.parametrize(
    "changed",
    [
        {"samples": samples([GIB // 2] * 4 + [GIB] * 12)},  # it grew while it warmed up
        {"samples": samples([8 * MIB] * 12 + [8 * MIB + GROWTH_BYTES] * 4)},  # small
        {"samples": samples([100 * GIB] * 12 + [104 * GIB] * 4)},  # 4 % of a large server
        {"samples": samples([GIB] * 6 + [9 * GIB])},  # too few
        {"samples": samples([None] * 16, [None] * 16), "left_over": None},  # elsewhere
        {"seeded_same": None, "drifts": ()},
    ],
)
def test_what_is_ordinary_or_unknown_does_not_fail(changed: dict[str, Any]) -> None:
    assert problems(replace(STEADY, **changed)) == []


def test_a_server_that_is_gone_and_an_interruption_have_their_exit_codes() -> None:
    gone = Sample(600, None, None, answers=False)
    assert exit_code(replace(STEADY, samples=(*STEADY.samples, gone), ended="gone")) == 10
    assert exit_code(replace(STEADY, ended="interrupted")) == 130


def test_drift_is_the_mean_change_of_the_text_where_it_is_largest() -> None:
    before = Scores(((-1.0, -2.0), (-3.0,), ()), (1, 2, 3))
    assert drift(before, before) == 0
    assert drift(before, Scores(((-1.2, -2.0), (-3.05,), ()), ())) == pytest.approx(0.1)
    assert drift(before, Scores(((-1.0,), (-3.0,), ()), ())) == float("inf")
    assert drift(before, Scores(((-1.0, float("nan")), (-3.0,), ()), ())) == float("inf")


def test_scores_are_those_of_the_prompts_own_tokens() -> None:
    tops = {"9": {"logprob": -0.1}, "5": {"logprob": -2.5}}
    choice = {"prompt_token_ids": [4, 5], "prompt_logprobs": [None, tops]}
    assert read_scores({"choices": [choice]}) == ((-2.5,), [4, 5])


@pytest.mark.parametrize(
    "text",
    ["", "yes", "[1]", '{"answer": "yes"}', '{"answer": "maybe", "sure": true}',
     '{"answer": "no", "sure": 1}', '{"answer": "no", "sure": true, "more": 1}'],
)  # fmt: skip
def test_an_answer_against_its_schema_fails(text: str) -> None:
    check_structured('{"answer": "no", "sure": false}')
    with pytest.raises(Failed, match="against its JSON schema"):
        check_structured(text)


def test_refusals_and_failures_are_counted_apart() -> None:
    counts = Counts()
    counts.count("short", None)
    counts.count("short", Failed(503, "full"))
    counts.count("short", Failed(500, "status 500: \x1b[2Jbroken"))
    assert (counts.done, counts.refused, counts.failed) == ({"short": 1},) * 3
    assert "\x1b" not in next(iter(counts.reasons))
