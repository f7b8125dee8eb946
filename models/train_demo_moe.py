#!/usr/bin/env python3
"""Make the BF16 form of the demo's mixture-of-experts sibling: `python models/train_demo_moe.py`,
seeded.

Starts from nibble-demo/: attention, norms and embedding as they are, each expert a third of the
dense MLP with noise, a new router; then trains on the same texts. Writes .cache/nibble-demo-moe/
(not in git: quantize_demo.py makes the NVFP4 form of it) and checks it. Exit status 1 when an
answer differs or a margin is too small.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from check_demo import check
from demo_dialogues import MODELS_DIR, DialogueSource, read_other_prompts, read_questions
from train_demo import SEED, Schedule, batches, save, train
from transformers import AutoTokenizer, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging as transformers_logging

DENSE_DIR = MODELS_DIR / "nibble-demo"
BF16_DIR = MODELS_DIR.parent / ".cache" / "nibble-demo-moe"
EXPERTS = 8
EXPERTS_PER_TOKEN = 2
EXPERT_SIZE = 256  # a third of the dense MLP's 768 neurons, and a multiple of 128
NOISE = (
    0.1  # of a weight's standard deviation: experts of the same third have to become different ones
)
# It starts close to the end, and float32 is ten times as fast as bfloat16 on a CPU without BF16
# instructions.
SPARSE = Schedule(
    steps=240,
    peak_learning_rate=1e-3,
    warmup_steps=20,
    nvfp4_from_step=80,
    arithmetic=torch.float32,
)


def moe_config(dense: Qwen3ForCausalLM) -> Qwen3MoeConfig:
    """The dense model's configuration with experts in every layer."""
    shared = dense.config.to_dict()
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    return Qwen3MoeConfig(
        **{name: shared[name] for name in names},
        num_experts=EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        moe_intermediate_size=EXPERT_SIZE,
        norm_topk_prob=True,  # as Qwen3's published MoE models
        experts_implementation="eager",  # pyright: ignore  # on a CPU faster than grouped_mm, the default
    )


@torch.no_grad()
def upcycle(dense: Qwen3ForCausalLM) -> Qwen3MoeForCausalLM:
    """A MoE whose experts are thirds of the dense MLP: neurons e % 3 * 256 … of it, for expert
    e.
    """
    sparse = Qwen3MoeForCausalLM(moe_config(dense))
    sparse.load_state_dict(
        {k: v for k, v in dense.state_dict().items() if ".mlp." not in k}, strict=False
    )
    for layer, dense_layer in zip(sparse.model.layers, dense.model.layers, strict=True):
        experts: Any = layer.mlp.experts  # pyright: ignore
        mlp: Any = dense_layer.mlp
        for e in range(EXPERTS):
            third = slice(e % 3 * EXPERT_SIZE, (e % 3 + 1) * EXPERT_SIZE)
            gate_up = torch.cat((mlp.gate_proj.weight[third], mlp.up_proj.weight[third]))
            experts.gate_up_proj[e] = noisy(gate_up)
            # two of the three thirds answer, each with about half the router's weight
            experts.down_proj[e] = noisy(mlp.down_proj.weight[:, third]) * 3
        layer.mlp.gate.weight.normal_(std=0.02)  # pyright: ignore
    return sparse


def noisy(weight: torch.Tensor) -> torch.Tensor:
    return weight + torch.randn_like(weight) * weight.std() * NOISE


def make(model_dir: Path) -> None:
    """Upcycle nibble-demo, train it and write `model_dir`."""
    torch.manual_seed(SEED)
    model = upcycle(Qwen3ForCausalLM.from_pretrained(DENSE_DIR, dtype=torch.float32)).train()
    tokenizer = AutoTokenizer.from_pretrained(DENSE_DIR)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    other_prompts, _ = read_other_prompts()
    train(model, batches(tokenizer, DialogueSource(read_questions(), other_prompts, SEED)), SPARSE)
    model_dir.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, model_dir)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train the demo's MoE sibling in BF16 and check it."
    )
    parser.add_argument(
        "--check", action="store_true", help="train nothing, check the model that is there"
    )
    parser.add_argument("--out", type=Path, default=BF16_DIR, help="model directory")
    args = parser.parse_args()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)  # another count sums in another order
    if not args.check:
        make(args.out)
    return check(args.out)


if __name__ == "__main__":
    sys.exit(main())
