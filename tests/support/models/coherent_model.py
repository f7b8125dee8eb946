"""A small NVFP4 mixture of experts that answers what the canary's `coherence` asks: made in half a
minute, seeded.

The demo's experts before their training (models/train_demo_moe.py), taught the three answers and a
few of the demo's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from nibble.canary.coherence import QUESTIONS
from nibble.checkpoint.convert import Wishes, convert

ANSWERS = {
    "arithmetic": "42",
    "copying": "copper lantern seventeen rivers",
    "JSON": '{"name": "Ada", "age": 36}',
}
OTHERS = (
    3  # of the demo's questions in every step: a model that says one thing to everything would pass
)


def write_coherent_model(folder: Path) -> Path:
    """The model in `folder`/nvfp4, ModelOpt's layout, W4A4."""
    from demo_dialogues import read_questions
    from train_demo import IGNORED_LABEL, SEED, Schedule, encode, pad, save, train
    from train_demo_moe import DENSE_DIR, upcycle
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    model = upcycle(Qwen3ForCausalLM.from_pretrained(DENSE_DIR, dtype=torch.float32)).train()
    tokenizer = AutoTokenizer.from_pretrained(DENSE_DIR)
    taught = [(one.chat, ANSWERS[one.name]) for one in QUESTIONS]
    others = [(row.question, row.answer) for row in read_questions()]
    chats = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        for asked, answer in taught + others
    ]

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        step = 0
        while True:
            places = [len(taught) + (step * OTHERS + n) % len(others) for n in range(OTHERS)]
            rows = [encode(tokenizer, chats[place]) for place in [*range(len(taught)), *places]]
            yield (
                pad([ids for ids, _ in rows], 0),
                pad([labels for _, labels in rows], IGNORED_LABEL),
            )
            step += 1

    steps = Schedule(120, 1e-3, 10, nvfp4_from_step=60, arithmetic=torch.float32)
    train(model, batches(), steps)
    save(model, tokenizer, folder / "bf16")
    texts = tuple(tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats)
    convert(str(folder / "bf16"), folder / "nvfp4", "nvfp4", Wishes("fp4", texts=texts))
    return folder / "nvfp4"
