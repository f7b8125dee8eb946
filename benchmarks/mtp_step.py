"""What drafting costs: a step of a Qwen3-8B-sized model with an MTP head, with 0 to 3 tokens drafted, and dummy NVFP4 weights.

    python benchmarks/mtp_step.py [--out FILE] [--drafts 0 1 2 3] [--batches 1 8] [--layers 36]

The model is Qwen3.5's dense one, which has such a head, in the size of kernels.md 10 (36 layers of full attention, 4096/12288, 32
and 8 heads, a vocabulary of 151936), W4A16 but for its head and its draft layer. A step is the time of a run over its steps, so
that it holds whatever is accepted; `break_even` is the share of drafts that has to be accepted before drafting saves time.
Each number of drafts is a vLLM in a process of its own, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": "bfloat16", "hidden_size": 4096,
    "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}, "eos_token_id": 2,
    "mtp_num_hidden_layers": 1, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "quantization_config": {
        "quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "producer": {"name": "modelopt", "version": "0.46.0"},
        "config_groups": {}, "group_size": 16, "ignore": ["lm_head", "mtp*"], "exclude_modules": ["lm_head", "mtp*"],
    },
}  # fmt: skip
TOKENS_IN, TOKENS_OUT, RUNS = 64, 128, 4
DRAFTED = {"drafts": "vllm:spec_decode_num_drafts", "accepted": "vllm:spec_decode_num_accepted_tokens"}


def main() -> None:
    """Measure every number of drafts and print a table."""
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
        print("RESULT " + json.dumps(measure(folder, int(drafts), options.batches, options.tokens)))
        return
    from machine import machine

    found: dict[str, Any] = {
        "machine": machine(),
        "command": sys.argv,
        "layers": options.layers,
        "drafts": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), options.layers, options.config)
        for drafts in options.drafts:
            found["drafts"][str(drafts)] = in_a_process(folder, drafts, options)
            print(drafts, json.dumps(found["drafts"][str(drafts)]), flush=True)
            break_even(found["drafts"])
            if options.out:  # after each: a lease may end
                options.out.write_text(json.dumps(found, indent=1) + "\n")


def write(folder: Path, layers: int, other: dict[str, Any]) -> None:
    """A checkpoint without weights."""
    config = CONFIG | other | {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "models" / "nibble-demo" / name, folder)


def in_a_process(folder: str, drafts: int, options: argparse.Namespace) -> dict[str, Any]:
    words = [sys.executable, __file__, "--tokens", str(options.tokens)]
    words += ["--batches", *map(str, options.batches), "--one", folder, str(drafts)]
    environ = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(words, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.rpartition("RESULT ")[2])


def measure(folder: str, drafts: int, batches: list[int], tokens: int) -> dict[str, Any]:
    """Milliseconds a step for each batch: the best of RUNS, the first not counted."""
    from vllm import LLM, SamplingParams

    speculation = (
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": drafts}} if drafts else {}
    )
    llm = LLM(
        folder,
        load_format="dummy",
        max_model_len=1024,
        max_num_seqs=max(batches),
        kv_cache_memory_bytes=(1 << 30) * 4,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculation,
    )

    def counters() -> dict[str, int]:
        values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        return {name: int(values.get(metric, 0)) for name, metric in DRAFTED.items()}

    found: dict[str, Any] = {}
    for batch in batches:
        prompts: list[Any] = [
            {"prompt_token_ids": [(row * 31 + place) % 1000 + 3 for place in range(TOKENS_IN)]}
            for row in range(batch)
        ]
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        rows = []
        for _ in range(RUNS):
            before, began = counters(), time.monotonic()
            llm.generate(prompts, sampling, use_tqdm=False)
            seconds, after = time.monotonic() - began, counters()
            each = {name: (after[name] - before[name]) / batch for name in after}
            steps = each["drafts"] or tokens - 1
            share = each["accepted"] / (steps * drafts) if drafts else None
            rows.append({"ms_a_step": round(1e3 * seconds / steps, 3), "accepted_share": share})
        found[str(batch)] = min(rows[1:], key=lambda row: row["ms_a_step"])
    return found


def break_even(ways: dict[str, dict[str, Any]]) -> None:
    """Add to each way the share of its drafts that has to be accepted before they save time."""
    for drafts, found in ways.items():
        for batch, row in found.items():
            if int(drafts) and (without := ways.get("0")):
                row["break_even"] = round(
                    (row["ms_a_step"] / without[batch]["ms_a_step"] - 1) / int(drafts), 3
                )


if __name__ == "__main__":
    main()
