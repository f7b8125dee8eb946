"""`nibble eval` without a server: scripts, parity, data sets, thresholds, streams, evidence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from nibble.bench.quality.outcome import Outcome
from nibble.bench.quality.parity import (
    Parity,
    Scored,
    compare,
    kl,
    perplexity,
    read_scored,
    write_scored,
)
from nibble.bench.quality.parsers import judge, named_in_recipes
from nibble.bench.quality.scripts import FORMS, PLAIN, SCRIPTS, WITHOUT_SCRIPTS, answer_of
from nibble.bench.quality.tasks import SHIPPED, Score, Task, read_scores, read_task, task_file
from nibble.bench.quality.thresholds import Thresholds, choose, failures, share
from nibble.bench.quality.tools import cases, read_stream, read_whole
from nibble.cli.verify_recipe import gather, recipe_lines
from nibble.errors import ExitCode
from nibble.machine.paths import root
from nibble.recipes.recipe import list_recipes, load_recipe, shape_problems
from tests.support.refusals import refusal_of


def logs(*shares: float) -> dict[int, float]:
    return {token: math.log(share) for token, share in enumerate(shares)}


def scored(*places: dict[int, float], model: str = "m") -> Scored:
    return Scored(model, tuple([0] * (len(places) + 1)), places)


def test_kl_of_equal_probabilities_is_zero_and_known_otherwise() -> None:
    assert kl(logs(0.5, 0.25), logs(0.5, 0.25)) == 0
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert kl(logs(0.5, 0.5), logs(0.25, 0.75)) == pytest.approx(expected)


def test_tokens_that_only_one_side_names_count_as_the_rest() -> None:
    # Coarser than the whole distributions, so that the figure is a lower bound
    ours, theirs = {0: math.log(0.5), 1: math.log(0.5)}, {0: math.log(0.5), 2: math.log(0.5)}
    assert kl(ours, theirs) == pytest.approx(0)
    assert kl({0: math.nan}, {0: -1.0}) == math.inf


def test_parity_has_mean_largest_and_share_of_equal_favourites() -> None:
    same, other = logs(0.6, 0.4), logs(0.4, 0.6)
    found = compare(scored(same, same), scored(same, other))
    assert found.top1 == 0.5 and found.tokens == 2
    assert found.kl_max_nats == pytest.approx(2 * found.kl_nats)
    assert perplexity(scored(same)) == pytest.approx(1 / 0.6)


def test_texts_of_other_tokens_are_refused() -> None:
    short, long = scored(logs(1.0)), scored(logs(1.0), logs(1.0), model="other")
    error = refusal_of(lambda: compare(short, long), ExitCode.CONFIG)
    assert "m and other have other tokens" in error.line()


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    wrote = scored(logs(0.5, 0.5), logs(0.25, 0.75))
    write_scored(wrote, tmp_path / "r.json")
    read = read_scored(tmp_path / "r.json")
    assert read.ids == wrote.ids and compare(read, wrote).kl_nats < 1e-6
    refusal_of(lambda: write_scored(wrote, tmp_path / "r.json"), ExitCode.CONFIG)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": "x"}',
                '{"format": "nibble eval log-probs 1", "model": "m", "ids": [1, 2], "places": []}',
                '{"format": "nibble eval log-probs 1", "model": "m", "ids": [1, 2],'
                ' "places": [{"3": -1}]}'],
)  # fmt: skip
def test_what_is_not_a_recording_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "r.json").write_text(content)
    error = refusal_of(lambda: read_scored(tmp_path / "r.json"), ExitCode.USAGE)
    assert "is not a recording of `nibble eval`" in error.line()


def test_every_tool_parser_of_a_recipe_has_scripts_or_a_reason() -> None:
    tables = []
    for name in list_recipes(root()):
        recipe = load_recipe(name, root())
        assert recipe is not None
        tables += [recipe.args, *(section.args for section in recipe.targets.values())]
    named = named_in_recipes(tables)
    assert len(named) >= 17
    assert [name for name in named if name not in FORMS and name not in WITHOUT_SCRIPTS] == []


@pytest.mark.parametrize("parser", FORMS)
def test_a_scripted_answer_holds_names_and_values(parser: str) -> None:
    text = answer_of(parser, SCRIPTS["two calls"])
    assert text.count("get_weather") >= 2 and "Oslo" in text and "Lima" in text
    assert PLAIN in answer_of(parser, ())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"calls": [["get_weather", '{"city": "Oslo", "days": 3}']], "content": "\n"}, ""),
        ({"calls": [], "content": ""}, "found []"),
        ({"calls": [["get_weather", "{"]], "content": ""}, "are not JSON"),
        ({"calls": [["get_weather", '{"city": "Oslo", "days": "3"}']], "content": ""}, "found"),
        ({"calls": [["get_weather", '{"city":"Oslo","days":3}']], "content": "<tool"}, "the text"),
        ({"error": "ValueError: x"}, "ValueError: x"),
    ],
)
def test_a_wrong_call_is_judged_with_its_reason(answer: dict[str, Any], reason: str) -> None:
    passed, why = judge(SCRIPTS["one call"], answer)
    assert passed == (not reason) and reason in why


def test_calls_in_a_stream_are_put_together_and_a_cut_stream_is_an_error() -> None:
    pieces = [
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}], "content": None},
    ]
    events = [f"data: {json.dumps({'choices': [{'delta': one}]})}\n\n" for one in pieces]
    whole = "".join([*events, "data: [DONE]\n\n"]).encode()
    found = read_stream(whole)
    assert (found.calls, found.ids) == ([("f", '{"x": 1}')], ["a"])
    with pytest.raises(ValueError, match="no end"):
        read_stream("".join(events).encode())


def test_each_check_refuses_what_it_should() -> None:
    by_name = {one.name: one.check for one in cases(True)}

    def message(content: str, *calls: tuple[str, str]) -> Any:
        ids = [f"id{place}" for place in range(len(calls))]
        tool_calls = [{"id": i, "function": {"name": n, "arguments": a}}
                      for i, (n, a) in zip(ids, calls, strict=True)]  # fmt: skip
        choice = {"message": {"content": content, "tool_calls": tool_calls}, "finish_reason": "x"}
        return read_whole({"choices": [choice]})

    good = ("get_weather", '{"city": "Oslo"}')
    assert by_name["tools, auto"](message("", good)) == ""
    assert "no call" in by_name["tools, auto"](message("It rains."))
    assert "lack" in by_name["tools, required"](message("", ("get_weather", "{}")))
    assert "unknown tool" in by_name["tools, required"](message("", ("other", "{}")))
    assert "it calls" in by_name["tools, none"](message("", good))
    assert "it calls" in by_name["scripted, one call"](message("", good))
    wanted = ("get_weather", '{"city": "Oslo", "days": 3}')
    assert by_name["scripted, one call"](message("", wanted)) == ""
    assert "not by the schema" in by_name["JSON by a schema"](message('{"name": 1}'))
    assert by_name["an answer of a list"](message("maybe"))
    assert len(cases(False)) == 3


def test_thresholds_come_from_options_then_the_recipe_then_nibble() -> None:
    found = choose({"max_kl": 0.5, "min_top1": None}, {"max_kl": 0.1, "min_tools": 0.9})
    assert found == Thresholds(max_kl=0.5, min_top1=0.95, min_tools=0.9, min_score=0.0)


def test_each_missed_threshold_is_a_line() -> None:
    limits = Thresholds(max_kl=0.01, min_score=0.5)
    parity = Parity(10, 0.02, 0.1, 0.5, 3.0, 2.0)
    outcomes = {
        "tools": [Outcome("a", False), Outcome("b", True, is_skipped=True)],
        "parsers": [Outcome("a", True)],
    }
    lines = failures(limits, parity, outcomes, [Score("t", 0.4, 0.1, 5)])
    assert [line.split()[0] for line in lines] == ["KL", "top-1", "tools:", "t:"]
    assert failures(Thresholds(), None, {"tools": [Outcome("a", True)]}, []) == []
    nan = Parity(10, math.nan, 0.1, 1.0, 3.0, 2.0)
    assert failures(limits, nan, {}, [])[0].startswith("KL")
    assert share([]) == 1.0


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_data_set_is_one(name: str) -> None:
    task = read_task(name)
    assert task.rows >= 40 and task_file(task)["dataset_kwargs"]["data_files"]["test"]


def test_the_answers_of_shipped_sums_are_right() -> None:
    rows = [json.loads(line) for line in SHIPPED["words"].read_text().splitlines()]
    for row in rows:
        numbers = [int(word) for word in row["question"].replace(",", "").split() if word.isdigit()]
        ways = {numbers[0] + numbers[1], numbers[0] - numbers[1], numbers[0] * numbers[1]}
        if len(numbers) == 3:
            ways = {numbers[0] * numbers[1] - numbers[2]}
        assert int(row["answer"]) in ways, row


@pytest.mark.parametrize(
    "content",
    ["", "x", "[]", '{"question": 1, "answer": 1}', '{"question": "q"}',
     '{"question": "q", "answer": 2, "choices": ["a", "b"]}',
     '{"question": "q", "answer": 1}\n{"question": "q", "answer": 1, "choices": ["a", "b"]}'],
)  # fmt: skip
def test_what_is_not_a_data_set_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "d.jsonl").write_text(content)
    error = refusal_of(lambda: read_task(str(tmp_path / "d.jsonl")), ExitCode.USAGE)
    assert "is not a data set" in error.line()


def test_scores_are_read_from_the_harnesss_result() -> None:
    tasks = [Task("a", Path("a"), 10, True), Task("b", Path("b"), 4, False)]
    results = {
        "a": {"acc,none": 0.5, "acc_stderr,none": 0.1},
        "b": {"exact_match,last-number": 0.25, "exact_match_stderr,last-number": "N/A"},
    }
    found = read_scores({"results": results}, tasks, 6)
    assert [(one.accuracy, one.error, one.questions) for one in found] == [
        (0.5, 0.1, 6), (0.25, 0.0, 4)]  # fmt: skip
    refusal_of(lambda: read_scores({"results": {}}, tasks, None), ExitCode.INTERNAL)


@pytest.mark.parametrize("quality", [{"max_kl": "small"}, {"max_kll": 1.0}, {"min_tools": True}])
def test_a_recipes_malformed_threshold_is_a_problem(quality: dict[str, Any]) -> None:
    found = list(shape_problems({"model": {"id": "a/b"}, "quality": quality}, "f"))
    assert [one.key.split(".")[0] for one in found] == ["quality"]


def test_evidence_names_what_ran_and_what_to_write_into_the_recipe(tmp_path: Path) -> None:
    quality = {"failures": [], "date": "d", "thresholds": {}, "parity": None, "scores": [],
               "parts": {"tools": {"share": 0.9, "cases": []}}}  # fmt: skip
    cell = {"concurrency": 1, "median": {"tokens_per_s": 100.0}}
    more = {"concurrency": 8, "median": {"tokens_per_s": 400.0}}
    speed = {"machine": {"cpu": "x"}, "software": {"vllm": "0.32.0"}, "cells": [cell, more]}
    found = gather("a/b", {"target": "cpu", "command": "vllm serve"}, quality, speed)
    lines = recipe_lines(found, tmp_path, tmp_path)
    assert lines[2] == 'status = "verified"'
    assert lines[3].startswith('evidence = "benchmarks/results/recipes/a_b-cpu.json: 100.0 tokens')
    failed = gather("a/b", {}, {**quality, "failures": ["KL"]}, speed)
    assert recipe_lines(failed, tmp_path, tmp_path)[0].endswith("the recipe stays as it is")
