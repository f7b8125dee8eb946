"""Answers with and without drafts that share their target's embedding or head, on any platform.

    python benchmarks/draft_answers.py [DRAFT …] [--draft-head nvfp4] [--out FILE]

nibble's plugin loads target and draft. Both have random weights, so few drafted tokens are
accepted. A draft whose embedding was not shared would read uninitialized memory. For each draft:
the share of greedy tokens that equal the target's alone, the drafted and accepted tokens, and
whether it embeds with the target's numbers, and the methods of both heads (`--draft-head` is
NIBBLE_DRAFT_HEAD). Exit code 1 if a draft did not answer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

DEFAULT = ("eagle", "eagle without an embedding", "eagle3")
PROMPTS, PROMPT_TOKENS, TOKENS = 8, 12, 48
METRICS = {
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("drafts", nargs="*", default=DEFAULT)
    parser.add_argument("--draft-head", choices=("bf16", "nvfp4"), default="bf16")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    from machine import machine

    from tests.support.models.generated_nvfp4 import Shape, write_checkpoint
    from tests.support.models.tiny_drafts import write_draft

    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "drafts": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        target = write_checkpoint(Path(scratch) / "target", Shape(layers=3), "bf16")
        alone, _ = answers(target, None, "bf16")
        for name in asked.drafts:
            wish = write_draft(Path(scratch) / name, name, target)
            speculation = {
                "method": wish["method"],
                "model": wish["folder"],
                "num_speculative_tokens": 2,
            }
            try:
                said, counts = answers(target, speculation, asked.draft_head)
                same = [
                    a == b
                    for one, other in zip(said, alone, strict=True)
                    for a, b in zip(one, other, strict=True)
                ]
                result["drafts"][name] = {"same_tokens": round(sum(same) / len(same), 4), **counts}
            except Exception as error:
                result["drafts"][name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            print(json.dumps({name: result["drafts"][name]}), flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(any("failed" in found for found in result["drafts"].values()))


def answers(
    target: Path, speculation: dict[str, Any] | None, draft_head: str
) -> tuple[list[list[int]], dict[str, Any]]:
    """Greedy tokens for each prompt, and the draft's counters."""
    import vllm

    llm = vllm.LLM(
        str(target),
        speculative_config=speculation,
        additional_config={"nibble": {"draft_head": draft_head}},
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=PROMPTS,
        gpu_memory_utilization=float(os.environ.get("GPU_MEMORY_UTIL", "0.3")),
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
    )
    prompts = [
        {"prompt_token_ids": [1 + (7 * start + place) % 120 for place in range(PROMPT_TOKENS)]}
        for start in range(PROMPTS)
    ]
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    counted = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    counts: dict[str, Any] = {name: int(counted.get(metric, 0)) for name, metric in METRICS.items()}
    if speculation:
        draft, served = models_of(llm)
        counts["embedding_is_the_targets"] = shares_embedding(draft, served)
        counts["draft_head"], counts["target_head"] = (
            type(model.lm_head.quant_method).__name__ for model in (draft, served)
        )
    llm.llm_engine.engine_core.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs], counts


def models_of(llm: Any) -> tuple[Any, Any]:
    """The draft and the target."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    speculator = getattr(runner, "speculator", None) or runner.drafter
    return speculator.model, runner.get_model()


def shares_embedding(*models: Any) -> bool:
    """Whether draft and target embed with the same numbers."""
    draft, target = (
        next(p for name, p in model.named_parameters() if name.endswith("embed_tokens.weight"))
        for model in models
    )
    return bool((draft == target).all())


if __name__ == "__main__":
    sys.exit(main())
