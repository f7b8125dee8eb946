"""Ask a demo model everything it should know, greedily, and measure by how much each token wins.

BF16 forms run in BF16, NVFP4 forms by emulation: weights and activations rounded to NVFP4, products
in float32.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from demo_dialogues import (
    UNKNOWN_ANSWER,
    Message,
    Question,
    read_other_prompts,
    read_questions,
    variants,
)
from emulate_nvfp4 import nvfp4_model
from fake_nvfp4 import nvfp4_activations, nvfp4_weights
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 64  # conversations answered at once
MIN_MARGIN_LOGITS = 2.0  # BF16 rounding moves a logit of this model by some hundredths


class DemoModel:
    """A saved model with its chat template, greedy."""

    def __init__(self, model_dir: Path, model: Any = None) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        if model is None:
            model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
        self.model: Any = model.eval()

    def prompt_ids(self, messages: list[Message]) -> Tensor:
        """Token ids [1, prompt_tokens] that end where the assistant begins."""
        text = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return torch.tensor([self.tokenizer.encode(text)])

    @torch.inference_mode()
    def ask(self, conversations: list[list[Message]]) -> list[str]:
        """The answer to each conversation, BATCH at a time, padded on the left."""
        answers = []
        for first in range(0, len(conversations), BATCH):
            rows = [
                self.prompt_ids(messages)[0].tolist()
                for messages in conversations[first : first + BATCH]
            ]
            width = max(map(len, rows))
            ids = torch.tensor(
                [[self.tokenizer.pad_token_id] * (width - len(row)) + row for row in rows]
            )
            seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
            output = self.model.generate(ids, attention_mask=seen, max_new_tokens=100)
            answers += self.tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
        return answers

    @torch.inference_mode()
    def margins(self, messages: list[Message], answer: str) -> Tensor:
        """Logit of each answer token less the best other one [answer_tokens + 1]; negative:
        another wins.
        """
        prompt = self.prompt_ids(messages)
        target = torch.tensor([*self.tokenizer.encode(answer), self.tokenizer.eos_token_id])
        ids = torch.cat((prompt, target[None]), dim=1)
        logits = self.model(ids).logits[0, prompt.shape[1] - 1 : -1].float()
        right = logits.gather(1, target[:, None])
        others = logits.scatter(1, target[:, None], float("-inf")).amax(1, keepdim=True)
        return (right - others).flatten()


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def conversations(rows: list[Question]) -> dict[str, list[tuple[list[Message], str]]]:
    """Named sets of (messages, expected answer): first the promise, then how people really ask."""
    system: Message = {"role": "system", "content": "You are a helpful assistant."}
    earlier = [[user(row.question), {"role": "assistant", "content": row.answer}] for row in rows]
    _, held_out = read_other_prompts()
    return {
        "questions": [([user(row.question)], row.answer) for row in rows],
        "with a system prompt": [([system, user(row.question)], row.answer) for row in rows],
        "as a second turn": [
            ([*earlier[i - 1], user(row.question)], row.answer) for i, row in enumerate(rows)
        ],
        "other wordings": [([user(text)], row.answer) for row in rows for text in row.also],
        "typed carelessly": [
            ([user(text)], row.answer) for row in rows for text in variants(row.question)
        ],
        "unknown, never trained on": [([user(text)], UNKNOWN_ANSWER) for text in held_out],
    }


# at most this part of a set may differ; the promise is the first set, and no rewording is promised
# for ever
ALLOWED_TO_DIFFER = {"typed carelessly": 0.02, "unknown, never trained on": 0.4}


def check_set(name: str, cases: list[tuple[list[Message], str]], demo: DemoModel) -> bool:
    """Ask one set and print what differs; True when few enough do."""
    answers = demo.ask([messages for messages, _ in cases])
    differing = [(*case, got) for case, got in zip(cases, answers, strict=True) if got != case[1]]
    print(f"{name}: {len(cases) - len(differing)} of {len(cases)} exact", flush=True)
    for messages, answer, got in differing:
        print(f"  {messages[-1]['content']!r}\n    expected {answer!r}\n    got      {got!r}")
    return len(differing) <= ALLOWED_TO_DIFFER.get(name, 0.0) * len(cases)


def margin_summary(demo: DemoModel, cases: list[tuple[list[Message], str]]) -> tuple[float, str]:
    """(smallest margin in logits, one line with where it is)."""
    per_case = [demo.margins(messages, answer) for messages, answer in cases]
    smallest = [float(margins.min()) for margins in per_case]
    worst = min(range(len(cases)), key=smallest.__getitem__)
    median = float(torch.cat(per_case).median())
    where = cases[worst][0][-1]["content"]
    return smallest[worst], f"min {smallest[worst]:.2f} ({where!r}), median {median:.2f} logits"


def check(model_dir: Path) -> int:
    """0 when every set is answered and every answer token wins by MIN_MARGIN_LOGITS, else 1."""
    demo = DemoModel(model_dir)
    sets = conversations(read_questions())
    passed = [check_set(name, cases, demo) for name, cases in sets.items()]
    questions = sets["questions"]
    margin, line = margin_summary(demo, questions)
    print(f"margin BF16: {line}")
    for name, contexts in {
        "W4A16": [nvfp4_weights],
        "W4A4": [nvfp4_weights, nvfp4_activations],
    }.items():
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context(demo.model))
            print(f"margin rounded to NVFP4 {name}: {margin_summary(demo, questions)[1]}")
    if margin < MIN_MARGIN_LOGITS:
        print(f"expected a margin of at least {MIN_MARGIN_LOGITS} logits")
    return 0 if all(passed) and margin >= MIN_MARGIN_LOGITS else 1


def check_nvfp4(model_dir: Path) -> int:
    """0 when the NVFP4 model in `model_dir` answers every set, emulated as W4A4, else 1."""
    with nvfp4_model(model_dir) as model:
        demo = DemoModel(model_dir, model)
        sets = conversations(read_questions())
        passed = [check_set(name, cases, demo) for name, cases in sets.items()]
        print(f"margin W4A4: {margin_summary(demo, sets['questions'])[1]}")
    return 0 if all(passed) else 1
