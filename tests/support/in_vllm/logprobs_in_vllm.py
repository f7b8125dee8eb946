"""vLLMs in one process, one after another: `python logprobs_in_vllm.py < JOBS` writes what each
makes of its prompt.

JOBS is a JSON list of [folder, options of vllm.LLM, prompt as token ids]. For each there is a line
with RESULT and JSON: the log-probabilities of the next token in the order of token ids, or a
string, the error of a model that was refused.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from typing import Any


def next_token_logprobs(folder: str, options: dict[str, Any], prompt: list[int]) -> list[float]:
    """In the order of token ids."""
    from vllm import LLM, SamplingParams

    common = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 2,
    }
    llm = LLM(
        folder,
        kv_cache_memory_bytes=64 << 20,
        max_logprobs=-1,
        dtype="bfloat16",
        **(common | options),
    )
    sampling = SamplingParams(max_tokens=1, logprobs=-1, temperature=0, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    found = (output.outputs[0].logprobs or [])[0]
    return [found[token].logprob for token in sorted(found)]


def result(job: tuple[str, dict[str, Any], list[int]]) -> list[float] | str:
    """Of one job; frees what its vLLM held."""
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        return next_token_logprobs(*job)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(
            AssertionError
        ):  # of a model that was refused before there were groups
            cleanup_dist_env_and_memory()


if __name__ == "__main__":
    for job in json.load(sys.stdin):
        print("\nRESULT " + json.dumps(result(job)), flush=True)
