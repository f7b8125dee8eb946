"""Decode tokens/s of Qwen3-8B and 30B-A3B shapes in NVFP4: vLLM's kernels compared with nibble's.

    python benchmarks/decode.py --out FILE [--shape 8b|30b-a3b] [--ways stock "nibble + NVFP4 head"]
        [--batches 1 4] [--prompts 128 2048] [--profile]

The shapes are Qwen3-8B's (36 layers, 4096/12288, 32 and 8 heads, vocabulary 151936) and
Qwen3-30B-A3B's (48 layers, 2048, 32 and 4 heads, 128 experts of 768, 8 per token), with dummy
weights in weight-only NVFP4. Each way is a vLLM in a separate process on the same GPU. Once all are
ready they measure alternately, one batch size after the other: 64 tokens in, 128 out, greedy, the
best of four. Then they measure the time to the first token for prompts of each length in
`--prompts`, one at a time (`--prompts` without lengths: none). --profile records the time of each
kernel over the steps of one more run, for the first three batches. A way whose vLLM does not start
is named in the results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
COMMON: dict[str, Any] = {
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "producer": {"name": "modelopt", "version": "0.45"},
        "config_groups": {},
        "ignore": ["lm_head", "*.mlp.gate"],
        "group_size": 16,
        "exclude_modules": ["lm_head", "*.mlp.gate"],
    },
}
# What a way is put together from: options of vLLM, and of nibble's plugin.
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stock": ({}, {}),
    "marlin": ({"linear_backend": "marlin"}, {}),
    "nibble": ({}, {"linear_kernel": "nibble"}),
    "experts": ({}, {"moe_kernel": "nibble"}),
    "NVFP4 head": ({}, {"quantize_lm_head": "nvfp4"}),
    "front": ({}, {"attention_front": "on"}),
    "8 splits": ({"attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 8}}, {}),
    "FlashAttention 2": ({"attention_config": {"flash_attn_version": 2}}, {}),
    "Triton attention": ({"attention_config": {"backend": "TRITON_ATTN"}}, {}),
    "FlashInfer": ({"attention_config": {"backend": "FLASHINFER"}}, {}),
    "q and k": ({"compilation_config": {"pass_config": {"enable_qk_norm_rope_fusion": True}}}, {}),
}
TOKENS_IN, TOKENS_OUT, RUNS = 64, 128, 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--ways", nargs="+", default=["stock", "nibble", "nibble + NVFP4 head"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--prompts", type=int, nargs="*", default=[32, 128, 512, 2048])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        answer(options)
        return
    for way in options.ways:
        options_of(way)
    words = [sys.executable, __file__, "--shape", options.shape]
    words += [
        "--batches",
        *map(str, options.batches),
        "--prompts",
        *map(str, options.prompts),
        "--serve",
    ]
    workers = {
        way: subprocess.Popen(
            [*words, way], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for way in options.ways
    }
    results: dict[str, Any] = {}
    for way, worker in list(workers.items()):
        try:
            results[way] = {"ready_s": wait_for(worker)}
        except EngineEnded as error:
            results[way] = {"failed": str(error)}
            del workers[way]
            print(way, error, flush=True)
    for batch in options.batches:
        for way, worker in workers.items():
            results[way][str(batch)] = ask(worker, {"batch": batch})
            print(way, batch, results[way][str(batch)], flush=True)
    for tokens in options.prompts:
        for way, worker in workers.items():
            milliseconds = results[way].setdefault("ms_of_a_prompt", {})
            milliseconds[str(tokens)] = ask(worker, {"prompt": tokens})
            print(way, "prompt of", tokens, milliseconds[str(tokens)], flush=True)
    for way, worker in workers.items():
        if options.profile:
            results[way]["profile"] = {
                str(batch): ask(worker, {"batch": batch, "profile": True})
                for batch in options.batches[:3]
            }
        end(worker)
    summary({way: results[way] for way in workers}, options.batches)
    if options.out:
        from machine import machine

        options.out.write_text(
            json.dumps(
                {
                    "machine": machine(),
                    "command": sys.argv,
                    "shape": options.shape,
                    "results": results,
                },
                indent=1,
            )
            + "\n"
        )


def options_of(way: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """vLLM's and the plugin's options of all of the way's parts."""
    unknown = set(way.split(" + ")) - set(PARTS)
    if unknown:
        raise SystemExit(
            f"unknown parts {sorted(unknown)}; there are {', '.join(PARTS)}, joined by ' + '"
        )
    arguments: dict[str, Any] = {}
    plugin: dict[str, Any] = {}
    for part in way.split(" + "):
        arguments |= PARTS[part][0]
        plugin |= PARTS[part][1]
    return arguments, plugin


def summary(results: dict[str, Any], batches: list[int]) -> None:
    """Milliseconds per step, and the ratio to the first way."""
    first = next(iter(results), "")
    for way, found in results.items():
        cells = [
            f"{found[str(batch)]['ms_a_step']:.3f} ms "
            f"({results[first][str(batch)]['ms_a_step'] / found[str(batch)]['ms_a_step']:.2f}x)"
            for batch in batches
        ]
        print(f"{way:32}", *cells)


class EngineEnded(Exception):
    """A vLLM that ended before it answered."""


def wait_for(worker: subprocess.Popen[str]) -> Any:
    """The worker's next answer. vLLM writes to the same stream."""
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.startswith("ANSWER "):
            return json.loads(line.removeprefix("ANSWER "))
    raise EngineEnded(f"its vLLM ended with {worker.wait()}")


def ask(worker: subprocess.Popen[str], question: dict[str, Any]) -> Any:
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(question) + "\n")
    worker.stdin.flush()
    return wait_for(worker)


def end(worker: subprocess.Popen[str]) -> None:
    """End a process that has finished: vLLM in a separate process sometimes hangs at its end."""
    if worker.stdin:
        worker.stdin.close()
    try:
        worker.wait(30)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()


def answer(options: argparse.Namespace) -> None:
    """Run one vLLM that answers questions from stdin until the input ends."""
    from vllm import LLM

    way, batches = options.serve, options.batches
    model = Path(tempfile.mkdtemp())
    (model / "config.json").write_text(json.dumps(COMMON | SHAPES[options.shape]))
    arguments, plugin = options_of(way)
    arguments["compilation_config"] = {"cudagraph_capture_sizes": batches} | arguments.get(
        "compilation_config", {}
    )
    begin = time.time()
    llm = LLM(
        str(model), skip_tokenizer_init=True, load_format="dummy", max_num_seqs=max(batches),
        max_model_len=context_tokens(options.prompts),
        gpu_memory_utilization=0.3, kv_cache_memory_bytes=4 << 30, quantization="modelopt_fp4",
        enable_flashinfer_autotune=False,
        additional_config={"nibble": plugin}, **arguments,
    )  # fmt: skip
    say(round(time.time() - begin, 1))
    for line in sys.stdin:
        question = json.loads(line)
        if "prompt" in question:
            say(prompted(llm, question["prompt"]))
        else:
            say(
                profiled(llm, question["batch"])
                if question.get("profile")
                else measured(llm, question["batch"])
            )


def context_tokens(prompts: list[int]) -> int:
    """Room for every prompt and one token; no prompts if `--prompts` has no lengths."""
    return max([1024, *prompts]) + 8


def say(found: Any) -> None:
    print("ANSWER", json.dumps(found), flush=True)


def generate(llm: Any, batch: int) -> None:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=TOKENS_OUT, ignore_eos=True, temperature=0.0, detokenize=False
    )
    prompts = [
        {"prompt_token_ids": [(i * 7 + j) % 1000 + 10 for j in range(TOKENS_IN)]}
        for i in range(batch)
    ]
    llm.generate(prompts, params, use_tqdm=False)


def measured(llm: Any, batch: int) -> dict[str, float]:
    """The best of RUNS after a warm-up."""
    generate(llm, batch)
    times = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        generate(llm, batch)
        times.append(time.perf_counter() - begin)
    best = min(times)
    return {
        "tokens_per_s": round(TOKENS_OUT * batch / best, 1),
        "ms_a_step": round(best / TOKENS_OUT * 1e3, 4),
    }


def prompted(llm: Any, tokens: int) -> float:
    """Milliseconds to the first token of a new prompt, the best of RUNS after a warm-up."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    times = []
    for run in range(RUNS + 1):
        prompt = {
            "prompt_token_ids": [
                tokens + run,
                *((run * 31 + i) % 1000 + 10 for i in range(1, tokens)),
            ]
        }
        begin = time.perf_counter()
        llm.generate([prompt], params, use_tqdm=False)
        times.append(time.perf_counter() - begin)
    return round(min(times[1:]) * 1e3, 3)


def profiled(llm: Any, batch: int) -> dict[str, float]:
    """Microseconds per step of each kernel: the twelve longest and their sum. Needs
    VLLM_ENABLE_V1_MULTIPROCESSING=0.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        generate(llm, batch)
    times: Counter[str] = Counter()
    for event in found.key_averages():
        times[event.key[:100]] += event.device_time_total / TOKENS_OUT
    longest = {name: round(float(time), 2) for name, time in times.most_common(12)}
    return longest | {"all kernels": round(float(sum(times.values())), 2)}


if __name__ == "__main__":
    main()
