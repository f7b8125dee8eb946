"""`python steps_in_vllm.py FOLDER`: a model's answers, in one process, with decode steps as one
operator that nibble prepares (cpu_step.py), and with those that vLLM prepares.

A line with RESULT and JSON for each way to divide prompts and to sample: how many steps nibble
prepared, of how many; and whether tokens, log-probabilities and those of prompts are the same bits.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PROMPTS = [[5 + (place * 7 + number * 31) % 100 for place in range(length)]
           for number, length in enumerate((1, 3, 45, 70, 33))]  # fmt: skip
TOKENS = 20


def samplings() -> dict[str, dict[str, Any]]:
    return {
        "greedy": {"temperature": 0, "logprobs": 3},
        "seeded": {
            "temperature": 0.8,
            "seed": 7,
            "top_p": 0.9,
            "presence_penalty": 0.5,
            "logit_bias": {9: 2.0},
            "min_tokens": 4,
            "bad_words": [],
        },
        "log-probs of prompts": {"temperature": 0, "prompt_logprobs": 2},
    }


def answers(llm: Any, sampling: dict[str, Any]) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=TOKENS, detokenize=False, ignore_eos=True, **sampling)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    llm.reset_prefix_cache()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (
            repr(each.outputs[0].token_ids),
            repr(each.outputs[0].logprobs),
            repr(each.prompt_logprobs),
        )
        for each in outputs
    ]


def compared(folder: str, piece: int) -> None:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from nibble.engine.plugin.cpu_decoder import OperatorForward

    llm = LLM(
        folder,
        kv_cache_memory_bytes=64 << 20,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,  # one prompt waits
        max_num_batched_tokens=64,
        long_prefill_token_threshold=piece,
        enable_prefix_caching=True,
    )
    prepared, steps = [], []
    step, update = OperatorForward.step, GPUModelRunner._update_states

    def counted_step(self: Any, *given: Any) -> Any:
        prepared.append(1)
        return step(self, *given)

    def counted_update(self: Any, *given: Any) -> Any:
        steps.append(1)
        return update(self, *given)

    OperatorForward.step = counted_step  # type: ignore[method-assign]
    GPUModelRunner._update_states = counted_update  # type: ignore[method-assign]
    shortened = CPUModelRunner.execute_model
    for name, sampling in samplings().items():
        prepared.clear()
        steps.clear()
        short = answers(llm, sampling)
        counts = len(prepared), len(steps)
        CPUModelRunner.execute_model = shortened.__wrapped__  # type: ignore[method-assign]
        whole = answers(llm, sampling)
        CPUModelRunner.execute_model = shortened  # type: ignore[method-assign]
        found = {"sampling": name, "piece": piece, "prepared": counts[0], "steps": counts[1]}
        print("\nRESULT " + json.dumps(found | {"equal": short == whole}), flush=True)
    OperatorForward.step = step  # type: ignore[method-assign]
    GPUModelRunner._update_states = update  # type: ignore[method-assign]
    del llm
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    for piece in (0, 1):  # whole prompts, and token by token
        compared(sys.argv[1], piece)
