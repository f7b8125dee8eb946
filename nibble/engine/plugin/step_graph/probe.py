"""Whether vLLM's code is the code that the graphs repeat and whose state they continue.

A step from graphs leaves out the host's part of vLLM's step. In another version that part may do
more, and no name or signature would show it. So the files themselves are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path

from nibble.engine.contract import VLLM_VERSION
from nibble.engine.plugin.require import VllmMismatch

# Module of vLLM 0.32.0 -> the first digits of its file's SHA-256. `python -m
# nibble.engine.plugin.step_graph.probe` prints those of the installed vLLM.
RUNNER_SOURCES = {
    "vllm.v1.attention.backends.flash_attn": "e6637cb5a66c4284",
    "vllm.v1.attention.backends.gdn_attn": "ce951db92bb58b5b",
    "vllm.v1.attention.backends.triton_attn": "8c886ae19377949a",
    "vllm.v1.core.sched.output": "2a3454c78ba1e7ff",
    "vllm.v1.sample.ops.topk_topp_triton": "d39388245d5d5f54",
    "vllm.v1.worker.gpu.async_utils": "1797a8abdb46bba9",
    "vllm.v1.worker.gpu.attn_utils": "4ff080ab9c815037",
    "vllm.v1.worker.gpu.block_table": "822b65f3d7bd4cad",
    "vllm.v1.worker.gpu.buffer_utils": "1f387c3557facb1c",
    "vllm.v1.worker.gpu.cudagraph_utils": "ef2aae2eb3ec5ea9",
    "vllm.v1.worker.gpu.input_batch": "2e4c2ebdb2c1ce04",
    "vllm.v1.worker.gpu.model_runner": "5240fe8d62d403e4",
    "vllm.v1.worker.gpu.model_states.default": "f1d34d5c8c03be6e",
    "vllm.v1.worker.gpu.model_states.mamba_hybrid": "262de489e3c02a2b",
    "vllm.v1.worker.gpu.sample.bad_words": "85c2f1a4a34eac0f",
    "vllm.v1.worker.gpu.sample.gumbel": "c14a5fa1899a9ff3",
    "vllm.v1.worker.gpu.sample.logit_bias": "39dc683f5dc58ee7",
    "vllm.v1.worker.gpu.sample.logprob": "ac58bfedaa325ae2",
    "vllm.v1.worker.gpu.sample.min_p": "4cb5e2f45e1ced6f",
    "vllm.v1.worker.gpu.sample.penalties": "a5e99c71e6ac50ef",
    "vllm.v1.worker.gpu.sample.sampler": "620b0ff1bea504eb",
    "vllm.v1.worker.gpu.sample.states": "7dbccea6fb6e2483",
    "vllm.v1.worker.gpu.sample.thinking_budget": "89d4255450c1659c",
    "vllm.v1.worker.gpu.spec_decode.eagle.speculator": "5d0b455880a166ce",
    "vllm.v1.worker.gpu.spec_decode.mtp.speculator": "b730010cad9d5477",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler": "25759f98e8aace9a",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils": "99556e8419a66b3b",
    "vllm.v1.worker.gpu.spec_decode.speculator": "b25efadde6376b21",
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils": "feb7054ae8de7d54",
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator": "2133fa15bae57b85",
    "vllm.v1.worker.gpu.spec_decode.utils": "7a7e245ecdf5041e",
    "vllm.v1.worker.gpu.states": "5ca84b57d4f4233b",
    "vllm.v1.worker.mamba_utils": "2d540d0d368e59b8",
    "vllm.v1.worker.utils": "85b23497017e5db0",
}


SCHEDULER_SOURCES = {
    "vllm.v1.core.block_pool": "6d1e0d89b43e3b2a",
    "vllm.v1.core.kv_cache_coordinator": "efd7193391197c55",
    "vllm.v1.core.kv_cache_manager": "d08315437c6b0704",
    "vllm.v1.core.single_type_kv_cache_manager": "fe38816a388bb5b6",
}


def check_source(sources: Mapping[str, str]) -> None:
    """Raise VllmMismatch if a file of vLLM differs."""
    for module, expected in sources.items():
        if digest_of(module) != expected:
            raise VllmMismatch(
                f"{module} of vLLM {metadata.version('vllm')} differs from vLLM {VLLM_VERSION}"
            )


def digest_of(module: str) -> str:
    """Empty if vLLM has no such module."""
    spec = util.find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:16]


if __name__ == "__main__":
    for name in (*RUNNER_SOURCES, *SCHEDULER_SOURCES):
        print(f'    "{name}": "{digest_of(name)}",')
