"""Answers with drafts, and the drafter's output head: `python draft_head_in_vllm.py < JOBS`.

JOBS is a JSON list of `{"target": …, "speculation": …, "head": "bf16" or "nvfp4"}`; `speculation`
is null for the target alone, and `options` and `ranks` may be there. For each there is a line with
RESULT and JSON, see `served`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

TOKENS, PROMPTS, PROMPT_TOKENS = 32, 4, 12
METRICS = {
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def served(job: dict[str, Any]) -> dict[str, Any]:
    """The greedy tokens of each prompt, drafted and accepted tokens, and what `heads` says of the
    first rank; `ranks` has all.
    """
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        job["target"],
        speculative_config=job["speculation"],
        additional_config={"nibble": {"draft_head": job["head"], **job.get("options", {})}},
        tensor_parallel_size=job.get("ranks", 1),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=PROMPTS,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=False,
        enable_prefix_caching=False,
    )
    prompts: list[Any] = [
        {"prompt_token_ids": [1 + (7 * start + place) % 120 for place in range(PROMPT_TOKENS)]}
        for start in range(PROMPTS)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    counted = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    ranks = llm.collective_rpc(heads) if job["speculation"] else []
    found = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        **{name: int(counted.get(metric, 0)) for name, metric in METRICS.items()},
        **(ranks[0] if ranks else {}),
        "ranks": ranks,
    }
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    return found


@torch.inference_mode()
def heads(worker: Any) -> dict[str, Any]:
    """Of target and drafter: the class of the head's method; of the drafter also its bytes, whether
    it is the target's module, and whether an argmax by shards finds the best logit.
    """
    runner = worker.model_runner
    target, draft = runner.get_model(), runner.drafter.model
    torch.manual_seed(0)  # the same on each rank
    head, processor = draft.lm_head, draft.logits_processor
    x = torch.randn(5, head.embedding_dim, dtype=torch.bfloat16)
    logits, by_shards = processor(head, x), processor.get_top_tokens(head, x)
    scale = getattr(head, "weight_global_scale", None)
    return {
        "target": type(target.lm_head.quant_method).__name__,
        "drafter": type(head.quant_method).__name__,
        "bytes": sum(p.numel() * p.element_size() for p in head.parameters()),
        "rows": head.num_embeddings_per_partition,
        "shared": head is target.lm_head,
        "global_scale": None if scale is None else float(scale),
        "argmax_by_shards": logits is None or bool((by_shards == logits.argmax(-1)).all()),
        "reported": reported(draft),
    }


def reported(draft: Any) -> list[str]:
    """What a worker's report says of the drafter's linear layers."""
    from nibble.engine.plugin.report.kernels_used import _linear

    return sorted({name for name in map(_linear, draft.modules()) if name})


if __name__ == "__main__":
    for job in json.load(sys.stdin):
        print("\nRESULT " + json.dumps(served(job)), flush=True)
