"""The cost of drafting: a step of a Qwen3-8B shape with an MTP head that drafts 0 to 3 tokens.

    python benchmarks/mtp_step.py [--out FILE] [--drafts 0 1 2 3] [--batches 1 8]

The model is MiMo, a dense model with such a head, in Qwen3-8B's sizes (36 layers, 4096/12288, 32
and 8 heads, vocabulary 151936), with dummy weights in weight-only NVFP4. Its output head and draft
layer are BF16, as in published checkpoints. A step is the time of a run divided by its steps, so it
does not depend on how many drafts are accepted. `break_even` is the share of drafts that must be
accepted before drafting saves time. vLLM 0.32 compiles Qwen3.5's draft layer, but not MiMo's
(mimo_mtp.py:153). Each number of drafts runs in a separate vLLM, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Qwen2's configuration with MiMo's architecture: transformers has no configuration of MiMo's own.
CONFIG: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "eos_token_id": 2,
    "num_nextn_predict_layers": 1,
}
TOKENS_IN, TOKENS_OUT, RUNS = 64, 128, 4
COUNTERS = {
    "steps": "vllm:spec_decode_num_drafts",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def main() -> None:
    """Measure every number of drafts, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--config", type=json.loads, default={}, help="other sizes, as JSON")
    parser.add_argument("--tokens", type=int, default=TOKENS_OUT)
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "DRAFTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        folder, drafts = options.one
        print(
            "RESULT",
            json.dumps(measure(folder, int(drafts), options.batches, options.tokens)),
            flush=True,
        )
        return
    from machine import machine

    ways: dict[str, dict[str, Any]] = {}
    found = {"machine": machine(), "command": sys.argv, "layers": options.layers, "drafts": ways}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), options.layers, options.config)
        for drafts in options.drafts:
            ways[str(drafts)] = in_a_process(folder, drafts, options)
            add_break_even(ways)
            print(drafts, json.dumps(ways[str(drafts)]), flush=True)
            if options.out:  # after each: a GPU machine may be taken away
                options.out.write_text(json.dumps(found, indent=1) + "\n")


def write(folder: Path, layers: int, other: dict[str, Any]) -> None:
    """A checkpoint without weights. The draft layer's number follows the model's last (vllm 0.32
    mimo_mtp.py:96).
    """
    ignored = ["lm_head", f"model.layers.{layers}.*"]
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "producer": {"name": "modelopt", "version": "0.46.0"},
        "config_groups": {},
        "group_size": 16,
        "ignore": ignored,
        "exclude_modules": ignored,
    }
    config = CONFIG | other | {"num_hidden_layers": layers, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))


def in_a_process(folder: str, drafts: int, options: argparse.Namespace) -> dict[str, Any]:
    words = [sys.executable, __file__, "--tokens", str(options.tokens)]
    words += ["--batches", *map(str, options.batches), "--one", folder, str(drafts)]
    environ = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(words, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.rpartition("RESULT ")[2].partition("\n")[0])


def measure(folder: str, drafts: int, batches: list[int], tokens: int) -> dict[str, Any]:
    """Seconds to a ready engine and, for each batch, milliseconds per step: the best of RUNS after
    a warm-up.
    """
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=max(batches),
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=4 << 30,
        enable_prefix_caching=False,
        enable_flashinfer_autotune=False,
        disable_log_stats=False,
        # The model's steps have a token and its drafts for each sequence, the draft layer's one
        # token.
        compilation_config={
            "cudagraph_capture_sizes": sorted(
                {*batches, *(batch * (drafts + 1) for batch in batches)}
            )
        },
        speculative_config={"method": "mtp", "num_speculative_tokens": drafts} if drafts else None,
    )
    found: dict[str, Any] = {"ready_s": round(time.perf_counter() - began, 1)}
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for batch in batches:
        prompts: list[Any] = [
            {"prompt_token_ids": [(row * 31 + place) % 1000 + 3 for place in range(TOKENS_IN)]}
            for row in range(batch)
        ]
        rows: list[dict[str, Any]] = []
        for _ in range(RUNS):
            before, began = counted(llm), time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            seconds, after = time.perf_counter() - began, counted(llm)
            counts = {name: (after[name] - before[name]) / batch for name in after}
            steps = counts["steps"] if drafts else tokens - 1
            share = {"accepted_share": counts["accepted"] / (steps * drafts)} if drafts else {}
            rows.append({"ms_a_step": round(1e3 * seconds / steps, 3), **share})
        found[str(batch)] = min(rows[1:], key=lambda row: row["ms_a_step"])
    return found


def counted(llm: Any) -> dict[str, int]:
    """vLLM's counters over all sequences: steps that verified drafts, and accepted drafted
    tokens.
    """
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {name: int(values.get(metric, 0)) for name, metric in COUNTERS.items()}


def add_break_even(ways: dict[str, dict[str, Any]]) -> None:
    """Add to each batch with drafts the share that must be accepted before drafting saves time."""
    plain = ways.get("0")
    for drafts in map(int, ways):
        for batch, row in ways[str(drafts)].items():
            if drafts and plain and batch != "ready_s":
                row["break_even"] = round(
                    (row["ms_a_step"] / plain[batch]["ms_a_step"] - 1) / drafts,
                    3,
                )


if __name__ == "__main__":
    main()
