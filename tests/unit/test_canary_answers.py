"""The canary's judgement of answers, with a stand-in for the server; faults of real servers are
in tests/e2e/test_canary.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nibble.canary.client import Answer, Asker
from nibble.canary.coherence import check_coherence
from nibble.canary.consistency import check_consistency
from nibble.canary.drafts import check_drafts
from nibble.canary.finding import Broken, NotCompared
from nibble.canary.layers import activations_of, check_layers
from nibble.canary.references import (
    LOOSE_LIMIT,
    MEAN_LIMIT,
    Case,
    References,
    check_references,
    read_references,
    write_references,
)
from nibble.canary.run import run_canary
from nibble.canary.verification import references_of
from nibble.engine.api import Api
from nibble.engine.installed import compiled_id
from nibble.errors import ExitCode, NibbleError
from nibble.hub.files import CANARY_FILE, WEIGHT_ONLY_CANARY_FILE
from nibble.machine.paths import root
from nibble.plan.choice import Choice
from tests.support.canary.fault_table import table
from tests.support.canary.worker_reports import HARDWARE

RIGHT = {
    "17 + 25": "42",
    "Repeat": "copper lantern seventeen rivers",
    "JSON": '```json\n{"name": "Ada", "age": 36}\n```',
}
LOW = (-3.0, -3.0)
ANSWER = Answer("ab", (1, 2), (3, 4), (-0.1, -0.2), (-0.1, -0.2), LOW)


class Scripted(Asker):
    """Answers as told."""

    def __init__(
        self,
        chat: dict[str, str] | None = None,
        scored: tuple[float, ...] = (-1.0, -0.1, -0.2),
        **more: Any,
    ) -> None:
        super().__init__(Api("127.0.0.1", 9, ""), "m", 10)
        self.chats, self.scored, self.more = chat, list(scored), more

    def has_chat(self) -> bool:
        return self.chats is not None

    def chat(self, messages: Any, tokens: int, **more: Any) -> dict[str, Any]:
        if "tools" in more:
            return self.more.get("call", {"content": "It is sunny."})
        question = messages[0]["content"]
        return {
            "content": next(
                (text for key, text in (self.chats or {}).items() if key in question), "banana"
            )
        }

    def answer(self, prompt: Any, tokens: int, **more: Any) -> Answer:
        found: Any = self.more.get("sampled" if more.get("top_k") == 1 else "greedy", ANSWER)
        return found if isinstance(found, Answer) else found(prompt)

    def score(self, ids: Any) -> list[float]:
        return self.scored


def test_right_answers_are_coherent() -> None:
    assert check_coherence(Scripted(RIGHT), tools=False).verdict == "passed"


def test_one_wrong_answer_is_a_warning_and_only_wrong_ones_are_a_failure() -> None:
    one = check_coherence(Scripted({key: RIGHT[key] for key in ("17 + 25", "JSON")}), tools=False)
    assert (one.verdict, one.warning) == ("passed", "wrong: copying ('banana')")
    assert check_coherence(Scripted({}), tools=False).verdict == "failed"


def test_a_tool_call_is_asked_for_where_a_parser_is_set() -> None:
    call = {"tool_calls": [{"function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]}
    assert check_coherence(Scripted(RIGHT, call=call), tools=True).warning == ""
    assert "tool call ('It is sunny.')" in check_coherence(Scripted(RIGHT), tools=True).warning


def test_a_model_without_a_chat_template_goes_on_with_texts() -> None:
    texts = {"17 + 25": " 42\n", "copper": " seventeen rivers", "Ada": '{"name": "Ada", "age": 36}'}

    def goes_on(prompt: str) -> Answer:
        return Answer(
            next(text for key, text in texts.items() if key in prompt), (), (), (), (), ()
        )

    assert check_coherence(Scripted(None, greedy=goes_on), tools=True).warning == ""


def test_penalties_of_the_models_generation_config_are_not_those_of_the_canary() -> None:
    """vLLM takes them for every request that names none; greedy tokens are then not the
    likeliest.
    """
    bodies: list[dict[str, Any]] = []

    class Recording(Asker):
        def _call(self, path: str, body: Any) -> tuple[int, bytes]:
            bodies.append(body)
            raise NotCompared("recorded")

    asker = Recording(Api("127.0.0.1", 9, ""), "m", 10)
    asks = (
        lambda: asker.answer("text", 2),
        lambda: asker.answer([{"role": "user", "content": "Hello"}], 2),
        lambda: asker.chat([{"role": "user", "content": "Hello"}], 2),
    )
    for ask in asks:
        with pytest.raises(NotCompared):
            ask()
    neutral = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    assert len(bodies) == 3 and all(neutral.items() <= body.items() for body in bodies)


def test_a_tokenizer_that_takes_no_template_arguments_is_asked_without_them() -> None:
    """Mistral's own: vLLM answers 400 to any."""

    class Mistral(Asker):
        def _call(self, path: str, body: Any) -> tuple[int, bytes]:
            if "chat_template_kwargs" in body:
                return 400, b"chat_template is not supported for Mistral tokenizers."
            return 200, json.dumps({"choices": [{"message": {"content": "42"}}]}).encode()

    asker = Mistral(Api("127.0.0.1", 9, ""), "m", 10)
    assert asker.chat([{"role": "user", "content": "What is 17 + 25?"}], 8)["content"] == "42"


def test_decoding_that_agrees_with_a_second_scoring_is_consistent() -> None:
    assert check_consistency(Scripted()).verdict == "passed"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"scored": (-1.0, -2.0, -3.0)}, "differ by 2.350 nats"),
        ({"scored": (-1.0, math.nan, -0.2)}, "differ by nan nats"),
        (
            {"greedy": Answer("ab", (1,), (3, 4), (-0.1, -5.0), (-0.1, -0.2), LOW)},
            "the sampler is wrong",
        ),
        (
            {
                "greedy": Answer(
                    "ab", (1,), (3, 4), (math.nan, -5.0), (math.nan, -0.2), (-3.0, -3.0)
                )
            },
            "not finite",
        ),
        (
            {"sampled": Answer("ac", (1,), (3, 5), (-0.1, -5.0), (-0.1, -0.2), LOW)},
            "sampling with top_k=1 chose a token of log-prob -5.00 where another has -0.20",
        ),
    ],
)
def test_what_is_inconsistent_fails(more: dict[str, Any], told: str) -> None:
    found = check_consistency(Scripted(**more))
    assert found.verdict == "failed"
    assert told in found.detail


def test_at_a_near_tie_sampling_may_choose_the_other_and_no_third() -> None:
    tie = Answer("ab", (1,), (3, 4), (-0.7, -0.2), (-0.7, -0.2), (-0.71, -3.0))
    verdicts = {}
    for own in (-0.71, -5.0):  # of the first token; what follows it is the likeliest
        other = Answer("xy", (1,), (9, 9), (own, -0.3), (-0.7, -0.3), (-0.71, -3.0))
        found = check_consistency(Scripted(greedy=tie, sampled=other, scored=(-1.0, -0.7, -0.2)))
        verdicts[own] = found.verdict
    assert verdicts == {-0.71: "passed", -5.0: "failed"}


CASE = Case("a", (1, 2), "ab", (3, 4), (-1.0, -0.1, -0.2))
SAME = {"hardware": "avx2", "build": compiled_id()}


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"greedy": Answer("ab", (1, 3), (3, 4), (-0.1, -0.2), (-0.1, -0.2), LOW)}, "the chat template or tokenizer differs"),  # noqa: E501
        ({"scored": (-2.0, -0.1, -0.2)}, "off by 0.333 nats"),
        ({"greedy": Answer("ax", (1, 2), (3, 5), (-0.1, -0.2), (-0.1, -0.2), LOW)}, "the answer to 'a' is 'ax', the recorded one 'ab'"),  # noqa: E501
        ({"greedy": Answer("a?", (1, 2), (3, 4), (-0.1, -0.2), (-0.1, -0.2), LOW)}, "the tokenizer differs"),  # noqa: E501
    ],
)  # fmt: skip
def test_what_is_not_as_recorded_fails(more: dict[str, Any], told: str) -> None:
    assert check_references(Scripted(), References((CASE,), "here")).verdict == "passed"
    found = check_references(Scripted(**more), References((CASE,), "here"))
    assert found.verdict == "failed"
    assert told in found.detail


def test_where_log_probs_may_differ_by_more_so_may_the_choice_between_two_tokens() -> None:
    gap = 0.8  # nats between the two best tokens
    other = Answer("ax", (1, 2), (3, 5), (-0.1, -0.5), (-0.1, -0.5), (-3.0, -0.5 - gap))
    for limit, verdict in ((MEAN_LIMIT, "failed"), (0.6, "passed")):
        references = References((CASE,), "here", mean_limit=limit)
        assert check_references(Scripted(greedy=other), references).verdict == verdict


def test_references_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "nibble-canary.json"
    assert read_references(path) is None
    write_references(path, [CASE], {"recorded": "in a test"})
    read = read_references(path)
    assert read is not None
    assert read.cases == (CASE,)


@pytest.mark.parametrize("text", ["{", "[]", '{"cases": [{"prompt": "a"}]}', '{"cases": 1}'])
def test_references_that_cannot_be_read_are_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "nibble-canary.json").write_text(text)
    with pytest.raises(NibbleError) as raised:
        read_references(tmp_path / "nibble-canary.json")
    assert raised.value.code == ExitCode.MODEL


def test_the_demo_models_have_references() -> None:
    for name in ("nibble-demo", "nibble-demo-nvfp4", "nibble-demo-moe-nvfp4"):
        found = read_references(root() / "models" / name / "nibble-canary.json")
        assert found is not None
        assert len(found.cases) == 6


def some_plan(tmp_path: Path, **args: Any) -> Any:
    settings, checkpoint = SimpleNamespace(model=str(tmp_path)), SimpleNamespace(path=tmp_path)
    target = SimpleNamespace(device="cpu")
    return SimpleNamespace(
        settings=settings, checkpoint=checkpoint, args=args, hardware=HARDWARE, target=target
    )


def test_the_references_with_the_same_activations_are_taken(tmp_path: Path) -> None:
    assert references_of(some_plan(tmp_path), ("fp4",)) is None
    write_references(tmp_path / CANARY_FILE, [CASE], {"activations": ["fp4"], "arithmetic": SAME})
    write_references(tmp_path / WEIGHT_ONLY_CANARY_FILE, [CASE], {"activations": ["bf16"]})
    for form, name in (("fp4", CANARY_FILE), ("bf16", WEIGHT_ONLY_CANARY_FILE)):
        found = references_of(some_plan(tmp_path), (form,))
        assert found is not None
        assert (found.where, found.mean_limit) == (str(tmp_path / name), MEAN_LIMIT)


def test_other_activations_and_flags_that_change_numbers_loosen_the_limit(tmp_path: Path) -> None:
    write_references(tmp_path / CANARY_FILE, [CASE], {"activations": ["fp4"], "arithmetic": SAME})
    flags = {"--kv-cache-dtype": "fp8", "--tensor-parallel-size": 2}
    given = [{flag: Choice(value, "command line")} for flag, value in flags.items()]
    for form, args in ((("bf16",), {}), *((("fp4",), one) for one in given)):
        found = references_of(some_plan(tmp_path, **args), form)
        assert found is not None
        assert found.mean_limit > MEAN_LIMIT


@pytest.mark.parametrize(
    ("recorded", "limit"),
    [
        (SAME, MEAN_LIMIT),
        (SAME | {"hardware": "avx512_bf16"}, LOOSE_LIMIT),
        (SAME | {"build": "0123456789ab"}, LOOSE_LIMIT),
        ({}, LOOSE_LIMIT),
    ],
)
def test_fp4_activations_recorded_on_other_hardware_or_by_another_build_loosen_the_limit(
    recorded: dict[str, str], limit: float, tmp_path: Path
) -> None:
    def limit_with(activations: str) -> float:
        about = {"activations": [activations], "arithmetic": recorded}
        write_references(tmp_path / CANARY_FILE, [CASE], about)
        found = references_of(some_plan(tmp_path), (activations,))
        assert found is not None
        return found.mean_limit

    assert limit_with("fp4") == limit
    assert limit_with("bf16") == MEAN_LIMIT


def test_activations_are_those_of_nvfp4_layers() -> None:
    checks = [
        entry(activations=["fp4, one scale"]),
        entry(activations=["plain"]),
        entry(part="attention", activations=["fp8"]),
    ]
    assert activations_of([{"rank": 0, "checks": checks}]) == ("fp4",)


class Counting(Scripted):
    """Has /metrics: so many drafted and accepted tokens after each answer."""

    def __init__(self, drafted: int, accepted: int, **more: Any) -> None:
        super().__init__(**more)
        self.asked, self.step = 0, (drafted, accepted)
        self.api = self  # type: ignore[assignment]

    def call(self, path: str, body: Any = None, timeout_s: float = 5) -> tuple[int, bytes]:
        drafted, accepted = (value * self.asked for value in self.step)
        self.asked += 1
        lines = f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}.0\n'
        return (
            200,
            (
                lines + f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}.0\n'
            ).encode(),
        )


@pytest.mark.parametrize(
    ("drafted", "accepted", "floor", "verdict"),
    [
        (60, 45, 0.7, "passed"),
        (60, 45, 0.8, "failed"),
        (60, 45, None, "passed"),
        (60, 0, None, "passed"),
        (4, 4, 0.5, "not compared"),
    ],
)
def test_drafts_have_to_be_accepted_as_often_as_the_recipe_says(
    drafted: int, accepted: int, floor: float | None, verdict: str
) -> None:
    found = check_drafts(Counting(drafted, accepted), floor)
    assert found.verdict == verdict
    assert ("only cost time" in found.warning) == (verdict == "passed" and not accepted)


def test_drafted_text_that_is_not_the_models_own_fails() -> None:
    found = check_drafts(Counting(60, 60, scored=(-1.0, -4.0, -4.0)), None)
    assert found.verdict == "failed"


def entry(**changed: Any) -> dict[str, Any]:
    return {
        "part": "linear",
        "kind": "Method uint8 [8, 8]",
        "layers": 2,
        "compared": 2,
        "activations": ["bf16"],
        "worst_error": 0.003,
        "wrong": 0,
        "wrong_layers": [],
        "not_compared": [],
    } | changed


def test_layers_are_judged_over_all_workers() -> None:
    assert check_layers([{"rank": 0, "checks": [entry()]}]).verdict == "passed"
    wrong = entry(
        wrong=1, wrong_layers=["model.layers.3: off by 1, at most 0.02"], worst_error="inf"
    )
    found = check_layers([{"rank": 0, "checks": [entry()]}, {"rank": 1, "checks": [wrong]}])
    assert (found.verdict, "rank 1, model.layers.3" in found.detail) == ("failed", True)
    found = check_layers([{"rank": 1, "checks": [wrong], "node": "b"}])
    assert "; node b: rank 1, model.layers.3" in found.detail


def test_what_has_no_reference_is_told_and_not_passed() -> None:
    blank = entry(compared=0, worst_error=None, not_compared=["no reference for this format"])
    assert check_layers([{"rank": 0, "checks": [blank]}]).verdict == "not compared"
    assert (
        "not compared: Method (no reference"
        in check_layers([{"rank": 0, "checks": [blank, entry()]}]).detail
    )


def test_a_mechanism_without_time_says_so() -> None:
    late = Asker(Api("127.0.0.1", 9, ""), "m", 0)
    with pytest.raises(NotCompared):
        late.score([1, 2])
    assert {one.verdict for one in run_canary(late, [], References((CASE,), "here"))} == {
        "not compared"
    }


class Refusing(Asker):
    """Every request is refused, or answered with something else."""

    def __init__(self, answer: tuple[int, bytes]) -> None:
        super().__init__(Api("127.0.0.1", 9, ""), "m", 10)
        self.api = SimpleNamespace(call=lambda path, body=None, timeout_s=5.0: answer)  # type: ignore[assignment]


def test_tokens_with_one_text_are_told_apart() -> None:
    """vLLM's /v1/completions answers {text: log-prob}: parts of a character have one text."""

    def call(path: str, body: Any, timeout_s: float = 5) -> tuple[int, bytes]:
        by_id = body.get("return_tokens_as_token_ids")
        names = ("token_id:8", "token_id:9") if by_id else ("\ufffd", "\ufffd")
        top = dict(zip(names, (-0.5, -0.6), strict=True))
        logprobs = {"token_logprobs": [-0.5], "top_logprobs": [top]}
        choice = {"text": "x", "token_ids": [8], "prompt_token_ids": [1], "logprobs": logprobs}
        return 200, json.dumps({"choices": [choice]}).encode()

    asker = Refusing((200, b""))
    asker.api = SimpleNamespace(call=call)  # type: ignore[assignment]
    answer = asker.answer("Hello", 1)
    assert (answer.best, answer.runner_up) == ((-0.5,), (-0.6,))


def test_nothing_is_sampled_where_it_would_end_the_engine() -> None:
    class Greedy(Scripted):
        def answer(self, prompt: Any, tokens: int, **more: Any) -> Answer:
            assert "top_k" not in more
            return ANSWER

    assert check_consistency(Greedy(), samples=False).verdict == "passed"


def test_a_server_that_fails_at_a_plain_request_fails_the_canary() -> None:
    Refusing((500, b"")).warm_up()  # a refusal is for later
    findings = run_canary(
        Refusing((500, b'{"error": "EngineCore encountered an issue"}')), [], drafts=True
    )
    asked = {found.mechanism: found for found in findings if found.mechanism != "layers"}
    assert {found.verdict for found in asked.values()} == {"failed"}
    assert (
        "answered 500" in asked["consistency"].detail
        and "EngineCore" in asked["consistency"].detail
    )


def test_a_chat_that_fails_is_no_missing_chat_template() -> None:
    with pytest.raises(Broken, match="/v1/chat/completions answered 500"):
        Refusing((500, b"")).has_chat()
    assert not Refusing((400, b'{"error": "no chat template"}')).has_chat()


def test_counters_that_do_not_come_in_time_are_not_compared() -> None:
    def call(path: str, body: Any = None, timeout_s: float = 5) -> tuple[int, bytes]:
        raise TimeoutError

    asker = Refusing((200, b""))
    asker.api = SimpleNamespace(call=call)  # type: ignore[assignment]
    _, drafts, *_ = run_canary(asker, [], drafts=True)
    assert (drafts.mechanism, drafts.verdict, drafts.detail) == (
        "drafts",
        "not compared",
        "no answer in time",
    )


@pytest.mark.parametrize(
    "answer",
    [(400, b'{"error": "no tokenizer"}'), (200, b'{"choices": [{}]}'), (200, b"{}"), (200, b"[")],
)
def test_a_server_that_answers_otherwise_is_not_compared_and_not_our_fault(
    answer: tuple[int, bytes],
) -> None:
    asker = Refusing(answer)
    asker.warm_up()
    found = run_canary(asker, [], References((CASE,), "here"), drafts=True)
    assert {one.verdict for one in found} == {"not compared"}


def test_docs_have_the_table_that_is_tested() -> None:
    text = (root() / "docs" / "canary.md").read_text()
    assert "\n".join(table()) in text, (
        "docs/canary.md: put the lines of tests/support/canary/fault_table.py there"
    )


def test_what_is_recorded_is_plain_json(tmp_path: Path) -> None:
    write_references(tmp_path / "file", [CASE, CASE], {})
    assert len(json.loads((tmp_path / "file").read_text())["cases"]) == 2
