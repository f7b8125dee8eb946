"""NVFP4 compared with BF16 on the CPU: single linear layers, and a generated Qwen3 in vLLM.

    python benchmarks/cpu_nvfp4.py [--out FILE] [--folder FOLDER] [--rounds 25] [--skip-model]
        [--level avx2] [--threads 2] [--thread-time]
    python benchmarks/cpu_nvfp4.py --loading CHECKPOINT [--out FILE]

Needs a CPU build of vLLM and an installed nibble-kernels (on sys.path, with its metadata).

Layers: each round times every variant once. The ratio compares the fastest rounds with the faster
of torch's BF16 and vLLM's, because other programs only add time. Copies of a weight take turns, so
that no cache holds them. The same rounds read as many bytes as the weight has: the limit of a
product with one row. Model: hidden 4096, intermediate 12288, 4 layers, vocabulary 2048, with equal
values in BF16 and NVFP4 (tests/support/models/generated_nvfp4.py, 2.7 GB below FOLDER). Each form
runs MODEL_RUNS times in separate processes, alternately; the faster run and the larger memory
count. Peak memory is VmHWM after the load, which includes pages of the mapped file; the largest
anonymous part is sampled every 5 ms. `--loading` measures only the memory of a process that loads a
checkpoint. `--thread-time` measures one thread's processor seconds instead of a clock's, which
other programs change less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
from machine import machine  # noqa: E402

from tests.support.models.generated_nvfp4 import Form, Shape, random_nvfp4, write_checkpoint  # noqa: E402

SHAPE = Shape(
    hidden=4096, intermediate=12288, layers=4, heads=32, kv_heads=8, head_dim=128, vocabulary=2048
)
LAYERS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "small gate_up": (12288, 2048),
    "small down": (2048, 6144),
}
ROWS = (1, 2, 4, 8, 16, 256)
BEYOND_CACHES_BYTES = 160 << 20
FORMS: dict[str, tuple[Form, bool]] = {
    "bf16": ("bf16", False),
    "nvfp4_w4a16": ("modelopt", False),
    "nvfp4_w4a4": ("modelopt", True),
}
DECODE_TOKENS, PROMPT_TOKENS = 24, 16
MODEL_RUNS = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=REPO / "benchmarks/results/cpu_nvfp4.json")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "cpu_nvfp4")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--level", help="instructions of nibble's products; default: the best")
    parser.add_argument("--threads", type=int, help="of the layers; default: torch's number")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument(
        "--thread-time", action="store_true", help="of one thread, with --threads 1"
    )
    parser.add_argument("--skip-model", action="store_true")
    parser.add_argument("--loading", type=Path, help="a checkpoint: only the memory of its load")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        print("\nRESULT " + json.dumps(serve(args.serve)))
        return
    command = " ".join(["python", "benchmarks/cpu_nvfp4.py", *sys.argv[1:]])
    if args.loading:
        loaded = serve_in_a_process(args.loading)
        sizes = {key: size for key, size in loaded.items() if "per_s" not in key}
        write(args.out, {"command": command, "machine": machine()} | sizes)
        return
    from nibble_kernels.nvfp4_linear import cpu_levels, use_cpu_level

    if args.thread_time and args.threads != 1:
        parser.error("--thread-time needs --threads 1")
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.level:
        use_cpu_level(args.level)
    found: dict[str, Any] = {
        "command": command,
        "machine": machine() | {"levels": cpu_levels(), "threads": torch.get_num_threads()},
        "level": args.level or cpu_levels()[0],
        "rounds": args.rounds,
        "model_runs": MODEL_RUNS,
    }
    found["layers"] = [
        time_layer(
            name, rows, args.rounds, time.thread_time if args.thread_time else time.perf_counter
        )
        for name in args.layers
        for rows in args.rows
    ]
    if not args.skip_model:
        found["model"] = compare_models(args.folder)
    write(args.out, found)


def write(out: Path, found: dict[str, Any]) -> None:
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def time_layer(name: str, rows: int, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Milliseconds of one layer with `rows` rows, the ratio to BF16, and the speed of reading its
    weight.
    """
    from nibble_kernels.memory import read_memory
    from nibble_kernels.nvfp4_linear.packed import nvfp4_packed_linear, pack_weight

    stored = random_nvfp4(name, *LAYERS[name], "cpu")
    weight_bytes = sum(tensor.nbytes for tensor in stored)
    copies = [pack_weight(*stored) for _ in range(-(-BEYOND_CACHES_BYTES // weight_bytes) + 2)]
    one, inverse = torch.tensor(2.0**-7), torch.tensor(300.0)
    weight = torch.randn(*LAYERS[name], dtype=torch.bfloat16)
    x = torch.randn(rows, LAYERS[name][1], dtype=torch.bfloat16)
    in_vllm = vllm_linear(weight, x)

    def copy(turn: int) -> Any:
        """Another one each time: the last call's may be in a cache."""
        return copies[turn % len(copies)]

    variants: dict[str, Callable[[int], object]] = {
        "read": lambda turn: [
            read_memory(one.view(torch.uint8).flatten()) for one in copy(turn)[:2]
        ],
        "bf16": lambda turn: torch.nn.functional.linear(x, weight),
        "bf16_vllm": lambda turn: in_vllm(),
        "nvfp4_w4a16": lambda turn: nvfp4_packed_linear(x, copy(turn + 1), one),
        "nvfp4_w4a4": lambda turn: nvfp4_packed_linear(
            x, copy(turn + 2), one, input_scale_inv=inverse
        ),
    }
    best = dict.fromkeys(variants, float("inf"))
    for turn in range(rounds):
        for variant, call in variants.items():
            start = clock()
            call(3 * turn)
            best[variant] = min(best[variant], (clock() - start) * 1e3)
    fastest_bf16 = min(best["bf16"], best["bf16_vllm"])
    ours = [variant for variant in variants if "nvfp4" in variant]
    return {
        "layer": name,
        "shape": LAYERS[name],
        "rows": rows,
        "ms": {variant: round(value, 3) for variant, value in best.items()},
        "read_gb_per_s": round(weight_bytes / best["read"] / 1e6, 1),
        "of_read_speed": {variant: round(best["read"] / best[variant], 2) for variant in ours},
        "times_as_fast_as_bf16": {
            variant: round(fastest_bf16 / best[variant], 2) for variant in ours
        },
    }


def vllm_linear(weight: torch.Tensor, x: torch.Tensor) -> Callable[[], object]:
    """vLLM's BF16 layer on this CPU (vllm 0.32 layers/utils.py:470)."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return lambda: layer.cpu_linear(x, layer.weight, None)


def compare_models(folder: Path) -> dict[str, Any]:
    """Run each form MODEL_RUNS times, alternately; the faster run and the larger memory count."""
    runs: dict[str, list[dict[str, Any]]] = {form: [] for form in FORMS}
    for _ in range(MODEL_RUNS):
        for form, (layout, w4a4) in FORMS.items():
            if not (folder / form / "model.safetensors").exists():
                write_checkpoint(folder / form, SHAPE, layout, w4a4=w4a4)
            runs[form].append(serve_in_a_process(folder / form))
    found = {form: combine(both) for form, both in runs.items()}
    for form in ("nvfp4_w4a16", "nvfp4_w4a4"):
        found[form]["times_as_fast_as_bf16"] = {
            key: round(found[form][key] / found["bf16"][key], 2)
            for key in ("decode_tokens_per_s", "decode_tokens_per_s_of_4", "prefill_tokens_per_s")
        }
        found[form]["linear_bytes_of_bf16"] = round(
            found[form]["linear_bytes"] / (2 * SHAPE.linear_elements()), 4
        )
    return found


def combine(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: max(run[key] for run in runs) for key in runs[0]}


def serve_in_a_process(folder: Path) -> dict[str, Any]:
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    words = [sys.executable, __file__, "--serve", str(folder)]
    done = subprocess.run(words, env=os.environ | own, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    return json.loads(done.stdout.rpartition("RESULT ")[2])


def serve(folder: Path) -> dict[str, Any]:
    """Load the folder with vLLM in this process, and time it."""
    from vllm import LLM, SamplingParams

    imported, imported_anonymous = memory_bytes("VmHWM"), memory_bytes("RssAnon")
    anonymous = LargestAnonymous()
    llm = LLM(
        str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=80 << 20,
        enable_prefix_caching=False,
    )
    peak, peak_anonymous = memory_bytes("VmHWM"), anonymous.stop()
    file_bytes = (folder / "model.safetensors").stat().st_size

    def seconds(prompts: int, length: int, tokens: int) -> float:
        options = SamplingParams(
            max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False
        )
        requests = [
            {"prompt_token_ids": list(range(3 + n, 3 + n + length))} for n in range(prompts)
        ]
        start = time.perf_counter()
        llm.generate(requests, options, use_tqdm=False)  # pyright: ignore
        return time.perf_counter() - start

    def decode_rate(prompts: int) -> float:
        many, one = (
            seconds(prompts, PROMPT_TOKENS, DECODE_TOKENS + 1),
            seconds(prompts, PROMPT_TOKENS, 1),
        )
        return prompts * DECODE_TOKENS / (many - one)

    seconds(1, PROMPT_TOKENS, 2)
    return {
        "file_bytes": file_bytes,
        "linear_bytes": sum(llm.apply_model(linear_bytes)),
        "peak_rss_of_imports": imported,
        "anonymous_of_imports": imported_anonymous,
        "peak_rss_loaded": peak,
        "peak_rss_less_file": peak - file_bytes,
        "peak_anonymous_loaded": peak_anonymous,
        "threads": torch.get_num_threads(),
        "decode_tokens_per_s": round(decode_rate(1), 2),
        "decode_tokens_per_s_of_4": round(decode_rate(4), 2),
        "prefill_tokens_per_s": round(256 / seconds(1, 256, 1), 1),
    }


def linear_bytes(model: torch.nn.Module) -> int:
    """Bytes of the parameters of the transformer layers' linear layers."""
    from vllm.model_executor.layers.linear import LinearBase

    found = [module for module in model.modules() if isinstance(module, LinearBase)]
    return sum(parameter.nbytes for module in found for parameter in module.parameters())


def memory_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


class LargestAnonymous(threading.Thread):
    """Samples the anonymous part of this process's memory until stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.largest, self.running = 0, True
        self.start()

    def run(self) -> None:
        while self.running:
            self.largest = max(self.largest, memory_bytes("RssAnon"))
            time.sleep(0.005)

    def stop(self) -> int:
        self.running = False
        self.join()
        return self.largest


if __name__ == "__main__":
    main()
