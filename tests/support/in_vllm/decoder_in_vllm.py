"""`python decoder_in_vllm.py [--amx] FOLDER...`: each model's answers with nibble's decoder
operators and with vLLM's modules, in one process.

A line with RESULT and JSON for each: how many steps the operators computed whole, and the largest
difference of a log-probability as long as the answers agree, with the number of tokens that do.
With --amx vLLM wants its cache as processors with AMX have it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.support.in_vllm.agreement import agreement

PROMPTS = [[5 + (place * 7 + number * 31) % 100 for place in range(length)]
           for number, length in enumerate((3, 45, 70))]  # fmt: skip
TOKENS = 24


def answers(llm: Any) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=TOKENS, logprobs=-1, temperature=0, detokenize=False, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    llm.reset_prefix_cache()
    return [output.outputs[0] for output in llm.generate(prompts, sampling, use_tqdm=False)]


def compared(folder: str) -> dict[str, Any]:
    from nibble_kernels.decoder import Decoder
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        folder,
        kv_cache_memory_bytes=64 << 20,
        max_logprobs=-1,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )
    steps, step = [], Decoder.step

    def counted(self: Decoder, *given: Any, **more: Any) -> Any:
        steps.append(1)
        return step(self, *given, **more)

    Decoder.step = counted  # type: ignore[method-assign]
    with_operators = answers(llm)
    Decoder.step = step  # type: ignore[method-assign]
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    inner = runner.get_model().model
    del inner.forward
    with_modules = answers(llm)
    largest, same = agreement(with_operators, with_modules)
    del llm
    cleanup_dist_env_and_memory()
    return {"whole_steps": len(steps), "largest": largest, "same_tokens": sum(same)}


def want_amx() -> None:
    """Before nibble's plugin is loaded. Processors without AMX cannot read such a cache."""
    from vllm.v1.attention.backends import cpu_attn

    def _get_attn_isa(
        dtype: Any, block_size: Any, head_size: Any = None, kv_cache_dtype: Any = None
    ):
        return "amx"

    cpu_attn._get_attn_isa = _get_attn_isa


if __name__ == "__main__":
    folders = sys.argv[1:]
    if folders[0] == "--amx":
        del folders[0]
        want_amx()
    for folder in folders:
        print("\nRESULT " + json.dumps(compared(folder)), flush=True)
