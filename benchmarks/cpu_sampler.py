"""Milliseconds of vLLM's sampler on the CPU platform, with and without nibble's changes.

    python benchmarks/cpu_sampler.py [--rounds 20] [--out FILE]

Both in one process and in turns; the fastest of all rounds, because other programs only add time.
A row has `streams` sequences with 64 tokens of a prompt and 200 of an answer each, whose logits are
normal with a standard deviation of 5. `request` is what the requests ask for: the first is what
Qwen3's generation_config.json sets for requests that set nothing, the second Qwen2.5's.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import machine

VOCABULARIES = {"SmolLM2": 49_152, "Qwen": 151_936}
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "presence_penalty": 1.0},
    {"temperature": 0.7},
    {"temperature": 0.0},
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    samplers = both_samplers()
    rows = []
    for model, vocabulary in VOCABULARIES.items():
        for streams in (1, 4):
            torch.manual_seed(0)
            logits = (torch.randn(streams, vocabulary) * 5).bfloat16()
            for request in REQUESTS:
                best = in_turns(samplers, logits, metadata(logits, request), options.rounds)
                row = {"vocabulary": f"{vocabulary} ({model})", "streams": streams}
                row |= {"request": request} | {f"{of}_ms": t for of, t in best.items()}
                rows.append(row | {"ratio": round(best["vllm"] / best["nibble"], 2)})
                print(rows[-1], flush=True)
    if options.out:
        command = f"python benchmarks/cpu_sampler.py --rounds {options.rounds} --out FILE"
        found = {"command": command, "machine": machine(), "rows": rows}
        options.out.write_text(json.dumps(found, indent=2) + "\n")


def both_samplers() -> dict[str, Callable[..., Any]]:
    """vLLM's sampler, before and after nibble's changes of it are installed."""
    import vllm._custom_ops  # noqa: F401
    from vllm.v1.sample.ops import penalties, topk_topp_sampler
    from vllm.v1.sample.sampler import Sampler

    from nibble.engine.plugin import cpu_draws, cpu_greedy, cpu_penalties, cpu_top_p

    places: list[tuple[Any, str]] = [
        (Sampler, "greedy_sample"),
        (penalties, "apply_penalties"),
        (topk_topp_sampler, "apply_top_k_top_p_pytorch"),
    ]

    def state() -> list[Any]:
        return [vars(owner)[name] for owner, name in places]

    def sample_with(sampler: Any, values: list[Any], *given: Any) -> Any:
        for (owner, name), value in zip(places, values, strict=True):
            setattr(owner, name, value)
        return sampler(*given)

    theirs = functools.partial(sample_with, Sampler(), state())
    cpu_draws.draw_with_few_exponentials()  # a sampler takes its method when it is made
    cpu_greedy.compare_in_vectors()
    cpu_penalties.change_few_logits()
    cpu_top_p.sort_few_logits()
    return {"vllm": theirs, "nibble": functools.partial(sample_with, Sampler(), state())}


def metadata(logits: torch.Tensor, request: dict[str, Any]) -> Any:
    """vLLM's of a batch of equal requests."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    streams, vocabulary = logits.shape

    def each(name: str, default: float) -> torch.Tensor:
        return torch.full((streams,), float(request.get(name, default)))

    is_greedy = not request["temperature"]
    top_k = torch.full((streams,), request.get("top_k", vocabulary), dtype=torch.int32)
    return SamplingMetadata(
        temperature=None if is_greedy else each("temperature", 1.0),
        all_greedy=is_greedy,
        all_random=not is_greedy,
        top_p=each("top_p", 1.0) if "top_p" in request else None,
        top_k=top_k if "top_k" in request else None,
        generators={},
        max_num_logprobs=None,
        no_penalties=not any("penalty" in name for name in request),
        prompt_token_ids=torch.randint(0, vocabulary, (streams, 64)),
        frequency_penalties=each("frequency_penalty", 0.0),
        presence_penalties=each("presence_penalty", 0.0),
        repetition_penalties=each("repetition_penalty", 1.0),
        output_token_ids=torch.randint(0, vocabulary, (streams, 200)).tolist(),
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


@torch.inference_mode()
def in_turns(
    samplers: dict[str, Callable[..., Any]], logits: torch.Tensor, given: Any, rounds: int
) -> dict[str, float]:
    best = dict.fromkeys(samplers, float("inf"))
    for _ in range(rounds):
        for name, sample in samplers.items():
            began = time.perf_counter()
            sample(logits, given)
            best[name] = min(best[name], 1e3 * (time.perf_counter() - began))
    return {name: round(ms, 2) for name, ms in best.items()}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
