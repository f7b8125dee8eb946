"""`python steps_in_vllm.py FOLDER`: a model's answers, in one process, with decode steps as one
operator that nibble prepares (cpu_step.py), and with those that vLLM prepares.

A line with RESULT and JSON for each way to divide prompts and to sample: how many steps nibble
prepared, of how many, and in how many the head computed the largest logits alone; and whether
tokens, log-probabilities and those of prompts are the same bits.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

PROMPTS = [[5 + (place * 7 + number * 31) % 100 for place in range(length)]
           for number, length in enumerate((1, 3, 45, 70, 33))]  # fmt: skip
TOKENS = 20
TOP_K = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "seed": 3}


def samplings() -> dict[str, dict[str, Any] | list[dict[str, Any]]]:
    """A list has those of the prompts, one after another."""
    return {
        "greedy": {"temperature": 0},
        "top-k": TOP_K,
        "greedy and top-k": [{"temperature": 0}, TOP_K, TOP_K | {"top_k": 3, "temperature": 2.0}],
        "one without top-k": [{"temperature": 0}, TOP_K | {"top_k": 0}, TOP_K],
        "minimum of tokens": {"temperature": 0, "min_tokens": 4, "stop_token_ids": [*range(60)]},
        "biased": TOP_K | {"logit_bias": {9: 5.0, 11: -100.0}},
        "min-p": TOP_K | {"min_p": 0.2},
        "some allowed": TOP_K | {"allowed_token_ids": [3, 8, 9, 21]},
        "penalties": TOP_K | {"repetition_penalty": 1.3},
        "log-probs": {"temperature": 0, "logprobs": 3},
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


def answers(llm: Any, sampling: dict[str, Any] | list[dict[str, Any]]) -> list[Any]:
    from vllm import SamplingParams

    each = sampling if isinstance(sampling, list) else [sampling]
    params = [
        SamplingParams(max_tokens=TOKENS, detokenize=False, ignore_eos=True, **one)
        for one, _ in zip(itertools.cycle(each), PROMPTS, strict=False)
    ]
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

    from nibble.engine.plugin import cpu_leading
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
    prepared, steps, leading = [], [], []
    step, update = OperatorForward.step, GPUModelRunner._update_states
    product = cpu_leading.bf16_leading

    def counted_step(self: Any, *given: Any) -> Any:
        prepared.append(1)
        return step(self, *given)

    def counted_update(self: Any, *given: Any) -> Any:
        steps.append(1)
        return update(self, *given)

    def counted_product(*given: Any) -> Any:
        leading.append(1)
        return product(*given)

    cpu_leading.bf16_leading = counted_product
    OperatorForward.step = counted_step  # type: ignore[method-assign]
    GPUModelRunner._update_states = counted_update  # type: ignore[method-assign]
    shortened = CPUModelRunner.execute_model
    for name, sampling in samplings().items():
        prepared.clear()
        steps.clear()
        leading.clear()
        short = answers(llm, sampling)
        counts = {"prepared": len(prepared), "steps": len(steps), "leading": len(leading)}
        CPUModelRunner.execute_model = shortened.__wrapped__  # type: ignore[method-assign]
        whole = answers(llm, sampling)
        CPUModelRunner.execute_model = shortened  # type: ignore[method-assign]
        found = {"sampling": name, "piece": piece, "equal": short == whole} | counts
        print("\nRESULT " + json.dumps(found), flush=True)
    cpu_leading.bf16_leading = product
    OperatorForward.step = step  # type: ignore[method-assign]
    GPUModelRunner._update_states = update  # type: ignore[method-assign]
    del llm
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    for piece in (0, 1):  # whole prompts, and token by token
        compared(sys.argv[1], piece)
