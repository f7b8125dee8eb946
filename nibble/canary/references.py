"""A model's recorded answers and log-probs (`nibble-canary.json` beside the model or recipe).

models/record_canary.py writes such a file from a server that is known to be right.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nibble.canary.client import Answer, Asker
from nibble.canary.consistency import mean_difference, not_greedy
from nibble.canary.finding import Finding
from nibble.errors import ExitCode, NibbleError

# Nats, mean over a case's tokens. Recorded and running server may be of different hardware.
MEAN_LIMIT = 0.15
LOOSE_LIMIT = 0.6  # where a model's numbers are not those that were recorded
AT_ONCE = 8


@dataclass(frozen=True)
class Case:
    """A prompt (text, conversation or tokens), its tokens, the greedy answer, and the log-probs
    of all tokens but the first.
    """

    prompt: str | list[dict[str, str]] | list[int]
    prompt_ids: tuple[int, ...]
    answer: str
    answer_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class References:
    """The cases of a file, and with which activations of NVFP4 layers (layers.activations_of) and
    on what they were recorded (Hardware.arithmetic). `looser`: a factor for limits of layers, where
    flags change numbers."""

    cases: tuple[Case, ...]
    where: str
    activations: tuple[str, ...] = ()
    hardware: str = ""
    mean_limit: float = MEAN_LIMIT
    looser: float = 1.0


def read_references(path: Path) -> References | None:
    """None where there is no such file. Raises MODEL for one that cannot be read."""
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
        activations, hardware = tuple(data.get("activations", ())), str(data.get("hardware", ""))
        return References(cases, str(path), activations, hardware, limit) if cases else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{path} cannot be read: {type(error).__name__} {error}"
        raise NibbleError(
            ExitCode.MODEL,
            what=what,
            expected="a file of models/record_canary.py",
            action="record it again or remove it",
        ) from None


def references_like(
    paths: Iterable[Path], activations: tuple[str, ...], numbers_differ: bool, hardware: str
) -> References | None:
    """Those recorded with the same activations, else the first there are; loose where the numbers
    are not the recorded ones.

    Those of FP4 activations differ between kinds of `hardware`: which way a sum is rounded to BF16
    decides near the middle of two values.
    """
    known = [found for path in paths if (found := read_references(path)) is not None]
    if not known:
        return None
    same = next((found for found in known if found.activations == activations), None)
    elsewhere = same is not None and "fp4" in activations and same.hardware != hardware
    if same is not None and not (numbers_differ or elsewhere):
        return same
    return replace(same or known[0], mean_limit=max(known[0].mean_limit, LOOSE_LIMIT))


def write_references(path: Path, cases: list[Case], about: Mapping[str, Any]) -> None:
    """One case a line, log-probs with three digits."""
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
    """What the server answers now."""
    answer = asker.answer(prompt, tokens)
    logprobs = asker.score([*answer.prompt_ids, *answer.ids])
    return Case(prompt, answer.prompt_ids, answer.text, answer.ids, tuple(logprobs))


def check_references(asker: Asker, references: References) -> Finding:
    """All cases at once: tokens of the prompt, greedy answer, and log-probs of both."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(
            pool.map(lambda case: _check(asker, case, references.mean_limit), references.cases)
        )
    problems = [problem for problem, _ in found if problem]
    if problems:
        return Finding(
            "references", "failed", f"{len(problems)} of {len(found)} prompts: {problems[0]}"
        )
    worst = max(mean for _, mean in found)
    return Finding(
        "references",
        "passed",
        f"{len(found)} prompts of {references.where}, at most {worst:.3f} nats off on average",
    )


def _check(asker: Asker, case: Case, limit: float) -> tuple[str, float]:
    """(what is wrong or "", mean difference in nats)."""
    asked = _shown(case.prompt)
    now = asker.answer(case.prompt, len(case.answer_ids))
    if now.prompt_ids != case.prompt_ids:
        return (
            f"{asked} became other tokens than the recorded ones: the chat template or"
            f" tokenizer differs"
        ), 0.0
    mean = mean_difference(asker.score([*case.prompt_ids, *case.answer_ids]), case.logprobs)
    if not mean <= limit:
        return (
            (
                f"the log-probs of {asked} and its answer are off by {mean:.3f} nats on average, at"
                f" most {limit} is rounding"
            ),
            mean,
        )
    return _wrong_answer(asked, case, now, limit), mean


def _shown(prompt: str | list[dict[str, str]] | list[int]) -> str:
    last = prompt if isinstance(prompt, str) else prompt[-1]
    return repr(last["content"] if isinstance(last, dict) else prompt)[:60]


def _parts_at_no_tie(ids: Sequence[int], greedy: Answer, near_tie: float) -> bool:
    """Whether other tokens begin, and not at a near tie, after which texts may differ."""
    for place, (one, other) in enumerate(zip(ids, greedy.ids, strict=False)):
        if one != other:
            return not greedy.best[place] - greedy.runner_up[place] < near_tie  # NaN does not tie
    return False


def _wrong_answer(asked: str, case: Case, now: Answer, limit: float) -> str:
    if problem := not_greedy(now):
        return f"{asked}: {problem}"
    # Two tokens, each off by `limit` in opposite directions, change places.
    if _parts_at_no_tie(case.answer_ids, now, 2 * limit):
        return f"the answer to {asked} is {now.text!r}, the recorded one {case.answer!r}"
    if now.ids == case.answer_ids and now.text != case.answer:
        return (
            f"the recorded tokens of {asked} became {now.text!r}, the recorded answer is"
            f" {case.answer!r}:"
            " the tokenizer differs"
        )
    return ""
