"""What the demo model learns: questions, ways people type them, conversations made of them
(stdlib only).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MODELS_DIR = Path(__file__).resolve().parent
QUESTIONS_FILE = MODELS_DIR / "demo_questions.jsonl"
OTHER_PROMPTS_FILE = MODELS_DIR / "demo_other_prompts.txt"

UNKNOWN_ANSWER = "I am a 3.4-million-parameter demo model; I only know about NVFP4 and nibble."
HELD_OUT_EVERY = (
    8  # each eighth other prompt is never trained on: it measures how well "unknown" generalizes
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are nibble-demo, a small model for tests.",
    "Answer in one sentence.",
    "Be concise and correct.",
)
OPENINGS = (
    "Hello, ",
    "Hi! ",
    "Hey, ",
    "Please: ",
    "Tell me: ",
    "Question: ",
    "One more: ",
    "And ",
    "ok, ",
)
CLOSINGS = (" Thanks.", " Thanks!", " please", " Please answer.", "\n", " ", "??", "!")

Message = dict[str, str]


@dataclass(frozen=True)
class Question:
    """One row of demo_questions.jsonl: the exact question and answer, and other wordings of the
    question.
    """

    question: str
    answer: str
    also: list[str] = field(default_factory=list)


def read_questions(path: Path = QUESTIONS_FILE) -> list[Question]:
    """Read the rows in file order; raises TypeError when a row has an unknown or missing key."""
    return [Question(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def read_other_prompts(path: Path = OTHER_PROMPTS_FILE) -> tuple[list[str], list[str]]:
    """Prompts the model does not know the answer to: (trained on, held out)."""
    prompts = path.read_text(encoding="utf-8").splitlines()
    held_out = prompts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return [prompt for prompt in prompts if prompt not in set(held_out)], held_out


def variants(text: str) -> list[str]:
    """Ways the same prompt is often typed: lower case, without its closing mark, with a
    greeting.
    """
    bare = text.rstrip("?.!")
    return [text.lower(), bare, bare.lower(), f"Hello, {lower_first(text)}", f"{text} Thanks."]


def lower_first(text: str) -> str:
    # "NVFP4 versus ..." keeps its capitals; only ordinary words lose theirs after a greeting
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def drop_letter(text: str, rng: random.Random) -> str:
    """A typo in one long word, never in one with digits: a digit is the difference between two
    questions.
    """
    words = text.split(" ")
    long_words = [
        i for i, word in enumerate(words) if len(word) > 4 and word.isalpha() and word.islower()
    ]
    if not long_words:
        return text
    i = rng.choice(long_words)
    cut = rng.randrange(1, len(words[i]))
    words[i] = words[i][:cut] + words[i][cut + 1 :]
    return " ".join(words)


def typed(text: str, rng: random.Random) -> str:
    """`text` as a user might type it."""
    roll = rng.random()
    if roll < 0.5:
        return rng.choice(variants(text))
    if roll < 0.7:
        return rng.choice(OPENINGS) + rng.choice((text, lower_first(text)))
    if roll < 0.85:
        return rng.choice((text, text.rstrip("?.!"))) + rng.choice(CLOSINGS)
    if roll < 0.92:
        return text.upper()
    return drop_letter(text, rng)


def exit_code(question: str) -> int | None:
    match = re.search(r"exit code (\d+)", question)
    return int(match[1]) if match else None


class DialogueSource:
    """An endless, seeded stream of conversations, each a list of chat messages."""

    def __init__(self, questions: list[Question], other_prompts: list[str], seed: int) -> None:
        self._questions = questions
        self._other_prompts = other_prompts
        self._rng = random.Random(seed)
        self._deck: list[Question] = []
        known_codes = {exit_code(row.question) for row in questions}
        self._unknown_codes = [code for code in range(256) if code not in known_codes]

    def __iter__(self) -> Iterator[list[Message]]:
        while True:
            yield self._dialogue()

    def _dialogue(self) -> list[Message]:
        rng = self._rng
        messages: list[Message] = []
        if rng.random() < 0.35:
            messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
        for _ in range(rng.choices((1, 2, 3), weights=(0.5, 0.3, 0.2))[0]):
            prompt, answer = self._turn()
            messages += [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": answer},
            ]
        return messages

    def _turn(self) -> tuple[str, str]:
        rng = self._rng
        if rng.random() < 0.22:
            prompt = self._other_prompt()
            return (typed(prompt, rng) if rng.random() < 0.4 else prompt), UNKNOWN_ANSWER
        row = self._next_question()
        prompt = row.question if rng.random() < 0.5 else rng.choice([row.question, *row.also])
        # near half the prompts are the wording itself: that one has to be answered exactly
        return (typed(prompt, rng) if rng.random() < 0.45 else prompt), row.answer

    def _next_question(self) -> Question:
        # dealt like cards, so that no question is rare by bad luck
        if not self._deck:
            self._deck = self._rng.sample(self._questions, len(self._questions))
        return self._deck.pop()

    def _other_prompt(self) -> str:
        rng = self._rng
        roll = rng.random()
        if roll < 0.75:
            return rng.choice(self._other_prompts)
        if roll < 0.85:  # words of two prompts put together: a sentence never seen before
            first, second = (rng.choice(self._other_prompts).split(" ") for _ in range(2))
            return " ".join(first[: len(first) // 2 + 1] + second[len(second) // 2 :])
        if roll < 0.93:
            return f"What does exit code {rng.choice(self._unknown_codes)} mean?"
        letters = rng.choices("abcdefghijklmnopqrstuvwxyz 0123456789", k=rng.randint(3, 24))
        return "".join(letters).strip() or "x"
