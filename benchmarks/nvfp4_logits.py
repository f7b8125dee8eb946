"""Log-probabilities of the demo models on every NVFP4 path, against float32 arithmetic.

    python benchmarks/nvfp4_logits.py [--device cuda] [--out results.json] [--only KERNEL …]
        [--models NAME …]
    python benchmarks/nvfp4_logits.py --rounding-noise DRAWS [--out results.json]

The reference dequantizes weights (and rounds activations, for W4A4) and multiplies in float32, in
transformers. Each path is a separate vLLM that scores the same tokens. The same emulation in BF16
arithmetic serves as a yardstick. Each position's whole distribution is compared: the largest
difference of a log-probability among tokens above 0.1 %, the mean Kullback-Leibler divergence in
nats, and how often the likeliest token differs. The last comparison is the BF16 demo with a
separate output head, in vLLM with and without NIBBLE_QUANTIZE_LM_HEAD=nvfp4.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import machine
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("nibble-demo-nvfp4", "nibble-demo-moe-nvfp4")
# All of them: a rounding decides which FP4 code an activation gets, and the mean over a third of
# them changes by a tenth from one order of additions to another.
QUESTIONS = 71
TIME_LIMIT_S = 300
# What docs/nvfp4.md states: the mean divergence in nats of every path from float32 arithmetic on
# the same weights, by model and NIBBLE_NVFP4_ACTIVATIONS. Roundings to BF16 alone give the dense
# W4A4 0.0187 (--rounding-noise): they decide which FP4 code an activation near a midpoint gets.
BOUNDS_NATS = {
    ("nibble-demo-nvfp4", "bf16"): 2e-4,
    ("nibble-demo-nvfp4", "checkpoint"): 0.02,
    ("nibble-demo-moe-nvfp4", "bf16"): 5e-3,
    ("nibble-demo-moe-nvfp4", "checkpoint"): 0.1,
}


class Way(NamedTuple):
    """A way to multiply. `activations` is NIBBLE_NVFP4_ACTIVATIONS; `backend` is that of linear
    layers and experts, "nibble" for nibble's kernel with Marlin's experts.
    """

    device: str
    activations: str
    backend: str = "auto"
    ranks: int = 1


PATHS = {
    "nibble on the CPU, W4A4": Way("cpu", "checkpoint"),
    "nibble on the CPU, W4A16": Way("cpu", "bf16"),
    "nibble on the CPU, W4A4, two ranks": Way("cpu", "checkpoint", ranks=2),
    "nibble on the CPU, W4A16, two ranks": Way("cpu", "bf16", ranks=2),
    "nibble on the GPU, W4A16": Way("cuda", "bf16", "nibble"),
    "Marlin, W4A16": Way("cuda", "bf16", "marlin"),
    "Humming, W4A16": Way("cuda", "bf16", "humming"),
    "Marlin given W4A4": Way("cuda", "checkpoint", "marlin"),
    "Humming given W4A4": Way("cuda", "checkpoint", "humming"),
    "emulation, W4A4": Way("cuda", "checkpoint", "emulation"),
}


def main() -> None:
    """Score every model on every path of the device and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--jobs", type=int, default=1, help="vLLMs at a time")
    parser.add_argument("--rounding-noise", type=int, help="draws for each number of ranks")
    parser.add_argument("--score", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.score:
        score(*options.score)
        return
    if options.rounding_noise:
        write(options.out, noise_rows(options.rounding_noise))
        return
    names = [
        name
        for name, path in PATHS.items()
        if path.device == options.device and (name in options.only or not options.only)
    ]
    results = []
    for model in options.models:
        references = {
            activations: reference(model, activations) for activations in ("checkpoint", "bf16")
        }
        with ThreadPoolExecutor(options.jobs) as pool:
            found = dict(
                zip(
                    names,
                    pool.map(lambda name, model=model: run_path(model, name), names),
                    strict=True,
                )
            )
        for activations, name in (("checkpoint", "W4A4"), ("bf16", "W4A16")):
            found[f"BF16 arithmetic in torch, {name}"] = reference(
                model, activations, torch.bfloat16
            )
        for name, logprobs in found.items():
            result: dict[str, Any] = {"model": model, "path": name}
            if isinstance(logprobs, str):
                result["failed"] = logprobs
            else:
                result |= {
                    f"to {'W4A4' if kind == 'checkpoint' else 'W4A16'}": compare(logprobs, wanted)
                    for kind, wanted in references.items()
                }
            results.append(result)
            print(json.dumps(result), flush=True)
        write(options.out, results)
    if not options.only:
        results.append(head_effect(options.device))
        print(json.dumps(results[-1]), flush=True)
        write(options.out, results)


def write(out: Path | None, results: list[dict[str, Any]]) -> None:
    """Write the results after each model, so that an interruption keeps them."""
    if out:
        about = machine() | {"questions": QUESTIONS}
        out.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")


def head_effect(device: str) -> dict[str, Any]:
    """The BF16 demo with its embedding copied to a separate output head, quantized at load or
    not.
    """
    from safetensors.torch import load_file, save_file

    folder, source = Path(tempfile.mkdtemp()), ROOT / "models/nibble-demo"
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    plain, quantized = (
        in_vllm(str(folder), device, options) for options in ({}, {"quantize_lm_head": "nvfp4"})
    )
    result: dict[str, Any] = {"model": "nibble-demo, untied", "path": "BF16 head to NVFP4 head"}
    if isinstance(plain, str) or isinstance(quantized, str):
        return result | {"failed": plain if isinstance(plain, str) else str(quantized)}
    return result | {"effect": compare(quantized, plain)}


def prompts(model: str) -> list[list[int]]:
    """Token ids of the first questions with their answers, which every path scores."""
    sys.path.insert(0, str(ROOT / "models"))
    from demo_dialogues import read_questions
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / model)
    found = []
    for row in read_questions()[:QUESTIONS]:
        messages = [
            {"role": "user", "content": row.question},
            {"role": "assistant", "content": row.answer},
        ]
        found.append(tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False)))
    return found


@torch.inference_mode()
def reference(model: str, activations: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Log-probabilities [positions, vocabulary] of transformers computing in `dtype`."""
    sys.path.insert(0, str(ROOT / "models"))
    sys.path.insert(0, str(ROOT))
    from emulate_nvfp4 import nvfp4_model

    def without_input_scales(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".input_scale")]:
            del tensors[name]

    change = without_input_scales if activations == "bf16" else (lambda tensors: None)
    with nvfp4_model(ROOT / "models" / model, change) as network:
        network = network.to(dtype)
        rows = [
            network(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
            for ids in prompts(model)
        ]
    return torch.cat(rows)


def noise_rows(draws: int) -> list[dict[str, Any]]:
    """The divergence that roundings alone cause in the dense W4A4 demo, on one and on two ranks."""
    wanted = reference(MODELS[0], "checkpoint")
    rows = []
    for ranks in (1, 2):
        found = [
            compare(with_roundings(MODELS[0], ranks, seed), wanted)["mean_kl_nats"]
            for seed in range(draws)
        ]
        rows.append(
            {
                "model": MODELS[0],
                "path": f"float32 with random roundings, W4A4, {ranks} rank{'s' * (ranks > 1)}",
                "mean_kl_nats": {
                    "mean": round(statistics.mean(found), 4),
                    "standard_deviation": round(statistics.stdev(found), 5),
                    "draws": sorted(found),
                },
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


@torch.inference_mode()
def with_roundings(model: str, ranks: int, seed: int) -> Tensor:
    """The W4A4 reference in float32, where each module's output changes by up to half a unit of
    BF16's last place, at random; sums over ranks change once for each rank.
    """
    sys.path.insert(0, str(ROOT / "models"))
    from emulate_nvfp4 import nvfp4_model

    generator = torch.Generator().manual_seed(seed)

    def rounded(times: int) -> Callable[..., Tensor]:
        def hook(module: Any, inputs: Any, output: Tensor) -> Tensor:
            for _ in range(times):
                output = output * (
                    1 + (2 * torch.rand(output.shape, generator=generator) - 1) / 512
                )
            return output

        return hook

    with nvfp4_model(ROOT / "models" / model, lambda tensors: None) as network:
        for name, module in network.named_modules():
            if hasattr(module, "weight") or type(module).__name__.endswith("MLP"):
                times = ranks if name.endswith(("o_proj", "down_proj")) else 1
                module.register_forward_hook(rounded(times))
        rows = [
            network(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
            for ids in prompts(model)
        ]
    return torch.cat(rows)


def run_path(model: str, name: str) -> Tensor | str:
    """Log-probabilities [positions, vocabulary] of one path, or the last line of its error."""
    way = PATHS[name]
    return in_vllm(
        model, way.device, {"nvfp4_activations": way.activations}, way.backend, way.ranks
    )


def in_vllm(
    model: str, device: str, options: dict[str, str], backend: str = "auto", ranks: int = 1
) -> Tensor | str:
    """Log-probabilities from a vLLM in a separate process, with these options of the plugin."""
    memory: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20}
    if device == "cuda":
        memory |= {"gpu_memory_utilization": 0.1}
    if backend == "nibble":
        options, backend = options | {"linear_kernel": "nibble"}, "marlin"
        memory |= {"linear_backend": "auto"}
    arguments = {
        "linear_backend": backend,
        "moe_backend": backend,
        "tensor_parallel_size": ranks,
        "additional_config": {"nibble": options},
    } | memory
    file = Path(tempfile.mkdtemp()) / "logprobs.pt"
    words = [sys.executable, __file__, "--score", model, json.dumps(arguments), str(file)]
    environ = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if ranks > 1:  # vLLM would bind each to a separate NUMA node
        environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, env=environ, timeout=TIME_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {TIME_LIMIT_S} s"
    if not file.exists():
        return " | ".join((done.stdout + done.stderr).strip().splitlines()[-3:])[-400:]
    return torch.load(file)


def score(model: str, arguments: str, out: str) -> None:
    """Write the log-probabilities of every token at every position, in a vLLM with these arguments
    (JSON).
    """
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(ROOT / "models" / model),
        max_model_len=256,
        max_num_seqs=4,
        max_logprobs=-1,
        enforce_eager=True,
        enable_prefix_caching=False,
        **json.loads(arguments),
    )
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1)
    batch = [{"prompt_token_ids": ids} for ids in prompts(model)]
    rows = []
    for output in llm.generate(batch, sampling, use_tqdm=False):
        for position in output.prompt_logprobs[1:]:
            rows.append(torch.tensor([position[token].logprob for token in range(len(position))]))
    torch.save(torch.stack(rows), out)


def compare(found: Tensor, wanted: Tensor) -> dict[str, float]:
    """The differences between two sets of log-probabilities [positions, vocabulary]."""
    wanted = wanted[:, : found.shape[1]]
    likely = wanted > torch.log(torch.tensor(1e-3))
    divergence = (wanted.exp() * (wanted - found)).sum(-1)
    return {
        "max_logprob_difference": round(float((found - wanted)[likely].abs().max()), 4),
        "mean_kl_nats": float(f"{float(divergence.mean()):.3g}"),
        "other_top_token": round(float((found.argmax(-1) != wanted.argmax(-1)).float().mean()), 5),
    }


if __name__ == "__main__":
    main()
