"""A model's recorded answers and log-probs (`nibble-canary.json` beside the model or recipe).

models/record_canary.py writes such a file from a server that is known to be right.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nibble.canary.client import Answer, Asker
from nibble.canary.consistency import mean_difference, not_greedy
from nibble.canary.finding import Finding
from nibble.errors import ExitCode, NibbleError

# Nats, mean over a case's tokens. The recording may come from a server on other hardware.
MEAN_LIMIT = 0.15
LOOSE_LIMIT = 0.6  # for a server whose flags, hardware or build change the recorded numbers
CONCURRENCY = 8


@dataclass(frozen=True)
class Case:
    """A prompt (text, conversation or token ids) and its greedy answer.

    logprobs: in nats, of all tokens of prompt and answer except the first.
    """

    prompt: str | list[dict[str, str]] | list[int]
    prompt_ids: tuple[int, ...]
    answer: str
    answer_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class References:
    """The cases of the file `where`.

    activations: formats of the NVFP4 layers that recorded them (layers.activations_of);
    arithmetic: what rounded the recording server's sums (verification.arithmetic_of); mean_limit:
    nats; limit_factor: multiplies the limits of layers, above 1 if flags change the numbers.
    """

    cases: tuple[Case, ...]
    where: str
    activations: tuple[str, ...] = ()
    arithmetic: Mapping[str, str] = field(default_factory=dict)
    mean_limit: float = MEAN_LIMIT
    limit_factor: float = 1.0


def read_references(path: Path) -> References | None:
    """The recorded cases, or None without a file. Raises MODEL if the file is invalid."""
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text())
        cases = tuple(
            Case(
                case["prompt"],
                tuple(case["prompt_ids"]),
                case["answer"],
                tuple(case["answer_ids"]),
                tuple(case["logprobs"]),
            )
            for case in data["cases"]
        )
        if any(
            len(case.logprobs) != len(case.prompt_ids) + len(case.answer_ids) - 1 for case in cases
        ):
            raise ValueError("a case has more or fewer log-probs than tokens")
        limit = float(data.get("mean_limit", MEAN_LIMIT))
        activations, arithmetic = (
            tuple(data.get("activations", ())),
            dict(data.get("arithmetic", {})),
        )
        return References(cases, str(path), activations, arithmetic, limit) if cases else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{path} cannot be read: {type(error).__name__} {error}"
        raise NibbleError(
            ExitCode.MODEL,
            what=what,
            expected="a file of models/record_canary.py",
            action="record it again or remove it",
        ) from None


def references_like(
    paths: Iterable[Path],
    activations: tuple[str, ...],
    numbers_differ: bool,
    arithmetic: Mapping[str, str],
) -> References | None:
    """The references with the same activations, else the first of `paths`; None without any.

    The limit is LOOSE_LIMIT if the server's numbers differ: through flags (`numbers_differ`), other
    activations, or, with FP4 activations, other `arithmetic`. There the rounding of a sum to BF16
    decides which FP4 code a value near a midpoint gets.
    """
    recorded = [each for path in paths if (each := read_references(path)) is not None]
    if not recorded:
        return None
    same = next((each for each in recorded if each.activations == activations), None)
    if same is not None and "fp4" in activations:
        numbers_differ |= same.arithmetic != arithmetic
    if same is not None and not numbers_differ:
        return same
    return replace(same or recorded[0], mean_limit=max(recorded[0].mean_limit, LOOSE_LIMIT))


def write_references(path: Path, cases: list[Case], about: Mapping[str, Any]) -> None:
    """Write a JSON file with one case per line and log-probs of three digits.

    about: further keys, such as `activations` and `arithmetic`.
    """
    lines = [
        json.dumps(
            {
                "prompt": case.prompt,
                "prompt_ids": case.prompt_ids,
                "answer": case.answer,
                "answer_ids": case.answer_ids,
                "logprobs": [round(value, 3) for value in case.logprobs],
            },
            ensure_ascii=False,
        )
        for case in cases
    ]
    head = "".join(f"{json.dumps(name)}: {json.dumps(value)}, " for name, value in about.items())
    path.write_text(f'{{{head}"cases": [\n' + ",\n".join(lines) + "\n]}\n")


def record(asker: Asker, prompt: str | list[dict[str, str]], tokens: int) -> Case:
    """The server's current answer to `prompt` with at most `tokens` tokens."""
    answer = asker.answer(prompt, tokens)
    logprobs = asker.score([*answer.prompt_ids, *answer.ids])
    return Case(prompt, answer.prompt_ids, answer.text, answer.ids, tuple(logprobs))


def check_references(asker: Asker, references: References) -> Finding:
    """Compare every case: tokens of the prompt, greedy answer, and log-probs of both."""
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        results = list(
            pool.map(lambda case: _check(asker, case, references.mean_limit), references.cases)
        )
    problems = [problem for problem, _ in results if problem]
    if problems:
        detail = f"{len(problems)} of {len(results)} prompts: {problems[0]}"
        return Finding("references", "failed", detail)
    worst = max(mean for _, mean in results)
    detail = (
        f"{len(results)} prompts of {references.where}, at most {worst:.3f} nats off on average"
    )
    return Finding("references", "passed", detail)


def _check(asker: Asker, case: Case, limit: float) -> tuple[str, float]:
    """(the problem or "", mean difference in nats)."""
    prompt = _abbreviated(case.prompt)
    answer = asker.answer(case.prompt, len(case.answer_ids))
    if answer.prompt_ids != case.prompt_ids:
        return (
            f"{prompt} became other tokens than the recorded ones: the chat template or"
            " tokenizer differs"
        ), 0.0
    mean = mean_difference(asker.score([*case.prompt_ids, *case.answer_ids]), case.logprobs)
    if not mean <= limit:  # also true for NaN
        problem = (
            f"the log-probs of {prompt} and its answer are off by {mean:.3f} nats on average, at"
            f" most {limit} is rounding"
        )
        return problem, mean
    return _wrong_answer(prompt, case, answer, limit), mean


def _abbreviated(prompt: str | list[dict[str, str]] | list[int]) -> str:
    """The beginning of a prompt or of a conversation's last message, in quotes."""
    last = prompt if isinstance(prompt, str) else prompt[-1]
    return repr(last["content"] if isinstance(last, dict) else prompt)[:60]


def _differs_without_tie(recorded_ids: Sequence[int], answer: Answer, near_tie: float) -> bool:
    """Whether the first different token is not a near tie. After a near tie, texts may differ."""
    for place, (recorded, token) in enumerate(zip(recorded_ids, answer.ids, strict=False)):
        if recorded != token:
            # NaN is not a tie.
            return not answer.best[place] - answer.runner_up[place] < near_tie
    return False


def _wrong_answer(prompt: str, case: Case, answer: Answer, limit: float) -> str:
    """The problem of an answer, or ""."""
    if problem := not_greedy(answer):
        return f"{prompt}: {problem}"
    # If both log-probs are off by `limit` in opposite directions, the two tokens change places.
    if _differs_without_tie(case.answer_ids, answer, 2 * limit):
        return f"the answer to {prompt} is {answer.text!r}, the recorded one {case.answer!r}"
    if answer.ids == case.answer_ids and answer.text != case.answer:
        return (
            f"the recorded tokens of {prompt} became {answer.text!r}, the recorded answer is"
            f" {case.answer!r}: the tokenizer differs"
        )
    return ""
