"""Healthy models of many families against their computed references. Each must pass.

    python benchmarks/reference_families.py [FAMILY …] [--jobs 1] [--out FILE]

The models have random weights and four layers in BF16. For each family of transformers: whether
nibble could follow its layers, whether products inside them were fed the reference's inputs, and
the largest difference. The results name models that vLLM cannot serve on this machine. Exit code 1
if a healthy model failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from reference_faults import run_model  # noqa: E402

BASE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "decoder_sparse_step": 1,
}
ALTERNATING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 64,
}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 64,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
}
LOCK = threading.Lock()
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "ministral3": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "arcee": {},
    "smollm3": {},
    "glm4": {},
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0156,
        "logits_scaling": 8.0,
    },
    "gemma2": ALTERNATING | {"tie_word_embeddings": True},
    "gemma3_text": ALTERNATING | {"tie_word_embeddings": True},
    "cohere2": ALTERNATING,
    "exaone4": ALTERNATING,
    "olmo2": {},
    "olmo3": ALTERNATING,
    "seed_oss": {},
    "starcoder2": {},
    "nemotron": {},
    "stablelm": {},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "qwen2_moe": MOE,
    "qwen3_moe": MOE | {"shared_expert_intermediate_size": 0},
    "mixtral": MOE,
    "olmoe": MOE,
    "granitemoe": MOE,
    "phimoe": MOE,
    "gpt_oss": MOE | ALTERNATING,
    "glm4_moe": MOE,
    "dots1": MOE,
    "laguna": MOE,
    "ernie4_5_moe": MOE | {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1},
    "deepseek_v2": MOE | LATENT | {"q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": MOE
    | LATENT
    | {"q_lora_rank": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "qwen3_next": MOE | LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": MOE | LINEAR,
    "falcon_h1": MAMBA | {"mamba_d_ssm": 512},
    "bamba": MAMBA | {"attn_layer_indices": [1, 3], "mamba_expand": 2},
    "granitemoehybrid": MOE
    | MAMBA
    | {
        "shared_intermediate_size": 128,
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_expand": 2,
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    from machine import machine

    os.environ["FAULTS"] = "none"
    data: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "families": {},
    }
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(asked.jobs) as pool:
        for name, found in zip(
            asked.families,
            pool.map(lambda one: compare(Path(scratch) / one, one), asked.families),
            strict=True,
        ):
            data["families"][name] = found
            print(json.dumps({name: found}), flush=True)
            if asked.out:
                asked.out.write_text(json.dumps(data, indent=1) + "\n")
    return int(
        any(
            str(found.get("verdict", "")).startswith("failed")
            for found in data["families"].values()
        )
    )


def compare(folder: Path, family: str) -> dict[str, Any]:
    """`verdict`, `has_inside`, `worst`; or `not_compared` with the reason."""
    try:
        write(folder, family)
        with tempfile.TemporaryDirectory() as scratch:
            none = run_model(str(folder), Path(scratch), "auto")["faults"]["none"]
    except subprocess.CalledProcessError as error:
        return {
            "not_compared": f"no reference: {(error.stderr or error.stdout or '').strip()[-200:]}"
        }
    except (SystemExit, Exception) as error:
        return {"not_compared": f"{type(error).__name__}: {error}"[:200]}
    report = none["report"] or {}
    points = [point for layer in report.get("layers", ()) for point in (layer, *layer["inside"])]
    return {
        "verdict": none["definition"],
        "has_inside": bool(points) and all(layer["inside"] for layer in report["layers"]),
        "worst": max((max(point["early"], point["late"]) for point in points), default=None),
        "nats": none["nats"],
    }


def write(folder: Path, family: str) -> None:
    """transformers' module with random weights, and the demo's tokenizer."""
    with LOCK:  # one seed for all threads, and one import
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **BASE | FAMILIES[family])
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        fill_zeros(model, config.initializer_range)
    model.save_pretrained(folder)
    for path in (ROOT / "models" / "nibble-demo").iterdir():
        if path.name.startswith("tokenizer") or path.suffix == ".jinja":
            shutil.copy(path, folder)


def fill_zeros(model: Any, spread: float) -> None:
    """Replace the zeros that transformers initializes with random numbers. Zero biases would have
    no effect. A router of zeros (Ernie 4.5) makes all experts equal, and each implementation of
    top-k then takes different ones.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point() and not tensor.any():
            tensor.data.normal_(0, spread)


if __name__ == "__main__":
    sys.exit(main())
