"""Questions that any usable language model answers: arithmetic, copying, JSON, a tool call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from nibble.canary.client import Asker
from nibble.canary.finding import Finding

TOKENS = 64
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True)
class Question:
    """A question with a predicate for correct answers.

    chat: the user's message; text: a text to continue, for a model without a chat template.
    """

    name: str
    chat: str
    text: str
    is_right: Callable[[str], bool]


def _is_person(answer: str) -> bool:
    match = re.search(r"\{[^{}]*\}", answer)
    try:
        person = json.loads(match[0]) if match else {}
    except ValueError:
        return False
    return (
        isinstance(person, dict) and person.get("name") == "Ada" and str(person.get("age")) == "36"
    )


QUESTIONS = (
    Question(
        "arithmetic",
        "What is 17 + 25? Answer with the number only.",
        "12 + 30 = 42\n2 + 2 = 4\n11 + 20 = 31\n17 + 25 =",
        lambda answer: re.search(r"\b42\b", answer) is not None,
    ),
    Question(
        "copying",
        "Repeat exactly these words and nothing else: copper lantern seventeen rivers",
        "copper lantern seventeen rivers\ncopper lantern seventeen rivers\ncopper lantern",
        lambda answer: "seventeen rivers" in answer,
    ),
    Question(
        "JSON",
        'Answer with one JSON object and nothing else: the keys are "name" and "age", the name is'
        " Ada and the age is 36.",
        '{"name": "Alan", "age": 41}\n{"name": "Grace", "age": 85}\nThe name is Ada and the age is'
        " 36:\n",
        _is_person,
    ),
)


def check_coherence(asker: Asker, tools: bool) -> Finding:
    """Ask all questions at once. Fails only if every answer is wrong.

    A small model or a base model may get one wrong; a broken model gets all wrong.
    """
    has_chat = asker.has_chat()
    checks = [partial(_ask, asker, question, has_chat) for question in QUESTIONS]
    if tools and has_chat:
        checks.append(partial(_tool_call, asker))
    with ThreadPoolExecutor(len(checks)) as pool:
        answers = list(pool.map(lambda check: check(), checks))
    wrong = [f"{name} ({answer!r})" for name, answer, right in answers if not right]
    names = ", ".join(name for name, _, _ in answers)
    if len(wrong) == len(answers):
        return Finding("coherence", "failed", f"no answer is right: {', '.join(wrong)}")
    return Finding("coherence", "passed", names, f"wrong: {', '.join(wrong)}" if wrong else "")


def _ask(asker: Asker, question: Question, has_chat: bool) -> tuple[str, str, bool]:
    """(name of the question, beginning of the answer, whether it is right)."""
    if has_chat:
        message = asker.chat([{"role": "user", "content": question.chat}], TOKENS)
        answer = "\n".join(
            str(message.get(part) or "") for part in ("reasoning", "reasoning_content", "content")
        )
    else:
        answer = asker.answer(question.text, TOKENS // 2).text
    return question.name, " ".join(answer.split())[:60], question.is_right(answer)


def _tool_call(asker: Asker) -> tuple[str, str, bool]:
    question = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
    message = asker.chat(question, TOKENS, tools=[TOOL], tool_choice="auto")
    calls: list[Any] = message.get("tool_calls") or []
    answer = json.dumps(calls[0]["function"]) if calls else str(message.get("content"))
    try:
        right = calls[0]["function"]["name"] == "get_weather" and "city" in json.loads(
            calls[0]["function"]["arguments"]
        )
    except (IndexError, ValueError, TypeError):
        right = False
    return "tool call", " ".join(answer.split())[:60], right
