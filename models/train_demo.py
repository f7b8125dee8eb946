#!/usr/bin/env python3
"""Make the embedded demo model again: `python models/train_demo.py`, minutes on two CPU cores,
seeded.

Reads demo_questions.jsonl and demo_other_prompts.txt, trains tokenizer and model, writes
nibble-demo/ (Hugging Face layout, BF16) and checks it. `--check` only checks. Exit status 1 when an
answer differs or a margin is too small.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from check_demo import check
from demo_dialogues import (
    MODELS_DIR,
    OPENINGS,
    SYSTEM_PROMPTS,
    UNKNOWN_ANSWER,
    DialogueSource,
    Message,
    read_other_prompts,
    read_questions,
)
from fake_nvfp4 import nvfp4_activations, nvfp4_weights
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

SEED = 20261121
TOKENS_PER_BATCH = 3072
WEIGHT_DECAY = 0.05
VOCAB_SIZE = 1024
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IGNORED_LABEL = -100


@dataclass(frozen=True)
class Schedule:
    """Steps of a training run: a linear warm-up, then a cosine down to 1 % of the peak.

    `arithmetic` is that of the products; weights are float32 masters. bfloat16: serving's rounding
    is there from the start.
    """

    steps: int
    peak_learning_rate: float
    warmup_steps: int
    nvfp4_from_step: int  # first learn, then learn to bear the rounding
    arithmetic: torch.dtype = torch.bfloat16

    def learning_rate(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak_learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / (self.steps - self.warmup_steps)
        return self.peak_learning_rate * (0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2)


DENSE = Schedule(steps=900, peak_learning_rate=2e-3, warmup_steps=60, nvfp4_from_step=450)
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: all 256 bytes are in the vocabulary, so any input tokenizes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    special = [
        AddedToken(t, special=True, normalized=False) for t in (END_OF_TEXT, TURN_START, TURN_END)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(
            f"the texts give {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}: add text"
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def demo_config() -> Qwen3Config:
    """3.4 M parameters; every GEMM (q 256, k and v 128, gate 768, lm_head 1024) is a multiple of
    128.
    """
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,  # one of vLLM's CPU head sizes: vllm 0.32 v1/attention/backends/cpu_attn.py:70
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def encode(
    tokenizer: PreTrainedTokenizerFast, dialogue: list[Message]
) -> tuple[list[int], list[int]]:
    """Token ids and labels; only the assistant's words and its turn end are learned."""
    ids: list[int] = []
    labels: list[int] = []
    for message in dialogue:
        head = tokenizer.encode(f"{TURN_START}{message['role']}\n")
        body = tokenizer.encode(f"{message['content']}{TURN_END}")
        tail = tokenizer.encode("\n")
        learned = body if message["role"] == "assistant" else [IGNORED_LABEL] * len(body)
        ids += head + body + tail
        labels += [IGNORED_LABEL] * len(head) + learned + [IGNORED_LABEL] * len(tail)
    return ids, labels


def batches(
    tokenizer: PreTrainedTokenizerFast, source: DialogueSource
) -> Iterator[tuple[Tensor, Tensor]]:
    """Right-padded batches of about TOKENS_PER_BATCH tokens; dialogues of like length go
    together.
    """
    rng = random.Random(SEED)
    dialogues = iter(source)
    while True:
        pool = sorted(
            (encode(tokenizer, next(dialogues)) for _ in range(512)), key=lambda pair: len(pair[0])
        )
        groups: list[list[tuple[list[int], list[int]]]] = [[]]
        for pair in pool:
            if len(pair[0]) * (len(groups[-1]) + 1) > TOKENS_PER_BATCH:
                groups.append([])
            groups[-1].append(pair)
        rng.shuffle(groups)
        for group in groups:
            yield (
                pad([ids for ids, _ in group], 0),
                pad([labels for _, labels in group], IGNORED_LABEL),
            )


def pad(rows: list[list[int]], filler: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])


def enter_noise(stack: ExitStack, model: PreTrainedModel, late: bool, step: int) -> None:
    """Of four late steps two are plain, one has NVFP4 weights, one NVFP4 weights and
    activations.
    """
    if not late or step % 4 < 2:
        return
    stack.enter_context(nvfp4_weights(model))
    if step % 4 == 3:
        stack.enter_context(nvfp4_activations(model))


def train(
    model: PreTrainedModel, data: Iterator[tuple[Tensor, Tensor]], schedule: Schedule
) -> None:
    """Train `model` in place; prints the loss of each fiftieth step."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
        fused=True,
    )
    started = time.monotonic()
    for step in range(schedule.steps):
        ids, labels = next(data)
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(step)
        with ExitStack() as stack:
            enter_noise(stack, model, step >= schedule.nvfp4_from_step, step)
            with torch.autocast(
                "cpu", torch.bfloat16, enabled=schedule.arithmetic is torch.bfloat16
            ):
                loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == schedule.steps - 1:
            print(
                f"step {step:4d}  loss {loss.item():.5f}  {time.monotonic() - started:5.0f} s",
                flush=True,
            )


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, model_dir: Path) -> None:
    """Write the Hugging Face layout, BF16, readable by every user."""
    model.bfloat16().save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)
    generation = {"do_sample": False, "temperature": 0.0, "eos_token_id": [2, 0], "pad_token_id": 0}
    write_json(model_dir / "generation_config.json", generation)
    for path in model_dir.iterdir():
        # save_pretrained leaves model.safetensors 0600: a container's user 2000 could not read it
        path.chmod(0o644)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def make(model_dir: Path) -> None:
    """Train tokenizer and model from the texts beside this file and write `model_dir`."""
    torch.manual_seed(SEED)
    questions = read_questions()
    other_prompts, _ = read_other_prompts()
    texts = [
        text for row in questions for text in (row.question, row.answer, row.answer, *row.also)
    ]
    roles = ["system\n", "user\n", "assistant\n"]
    tokenizer = train_tokenizer(
        [*texts, *other_prompts, *SYSTEM_PROMPTS, *OPENINGS, *roles, UNKNOWN_ANSWER]
    )
    model = Qwen3ForCausalLM(demo_config()).train()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(questions)} questions")
    train(model, batches(tokenizer, DialogueSource(questions, other_prompts, SEED)), DENSE)
    model_dir.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, model_dir)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the demo model and check it.")
    parser.add_argument(
        "--check", action="store_true", help="train nothing, check the model that is there"
    )
    parser.add_argument(
        "--out", type=Path, default=MODELS_DIR / "nibble-demo", help="model directory"
    )
    args = parser.parse_args()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(min(2, os.cpu_count() or 1))  # another count sums in another order
    if not args.check:
        make(args.out)
    return check(args.out)


if __name__ == "__main__":
    sys.exit(main())
