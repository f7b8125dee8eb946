"""`python front_in_vllm.py < JOBS`: answers of a vLLM with nibble's kernel before attention and of
one without it, in one process.

JOBS is a JSON list of [folder, options of vllm.LLM]. For each there is a line with RESULT and JSON:
the largest difference of a log-probability as long as the answers agree, how many tokens of each
answer do, and with and without the option: the kernel's calls, how many modules have it, and what
the canary's comparisons of attention say.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.support.in_vllm.agreement import agreement

# Longer than a step takes (chunks), with a beginning that two share (prefix caching), and short.
PROMPTS = [[5 + (place * 7 + number % 2 * 31) % 100 for place in range(length)]
           for number, length in enumerate((3, 150, 70, 150))]  # fmt: skip
PROMPTS[3][140:] = [9] * 10
TOKENS = 24


def answers(folder: str, options: dict[str, Any], front: str) -> tuple[list[Any], dict[str, Any]]:
    """Answers, and what the kernel had to do with them."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    from nibble.engine.plugin.attention import front as plugin

    calls, call = [], plugin.attention_front

    def counted(*given: Any, **more: Any) -> Any:
        calls.append(1)
        return call(*given, **more)

    plugin.attention_front = counted
    common = {
        "kv_cache_memory_bytes": 64 << 20,
        "max_logprobs": -1,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": True,
        "additional_config": {"nibble": {"attention_front": front}},
    }
    llm = LLM(folder, **(common | options))
    sampling = SamplingParams(
        max_tokens=TOKENS, logprobs=-1, temperature=0, detokenize=False, ignore_eos=True
    )
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found = llm.generate(prompts[:3], sampling, use_tqdm=False)
    found += llm.generate(prompts[3:], sampling, use_tqdm=False)
    executor: Any = llm.llm_engine.model_executor
    worker = executor.driver_worker.worker
    modules = worker.model_runner.get_model().modules()
    about = {
        "calls": len(calls),
        "modules": sum(isinstance(module, plugin._WithFront) for module in modules),
        "checks": checks(worker),
    }
    if front == "on":  # RoPE in the wrong order, also for what was written before
        plugin.attention_front = lambda *given, neox, **more: call(*given, neox=not neox, **more)
        about["checks_of_a_fault"] = checks(worker)
    del llm, executor, worker, modules
    cleanup_dist_env_and_memory()
    plugin.attention_front = call
    return [output.outputs[0] for output in found], about


def checks(worker: Any) -> dict[str, list[str]]:
    """The canary's comparisons of attention: kind -> problems."""
    import torch
    from vllm.config import set_current_vllm_config

    from nibble.engine.plugin.report.attention import attention_results

    problems: dict[str, list[str]] = {}
    with torch.inference_mode(), set_current_vllm_config(worker.vllm_config):
        for _, results in attention_results(worker):
            for result in results:
                problems.setdefault(result.kind, []).append(result.problem)
    return problems


def compared(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    ours, about = answers(folder, options, "on")
    theirs, about_others = answers(folder, options, "off")
    largest, same = agreement(ours, theirs)
    return {"largest": largest, "same_tokens": same, "on": about, "off": about_others}


if __name__ == "__main__":
    for job in json.load(sys.stdin):
        print("\nRESULT " + json.dumps(compared(*job)), flush=True)
