"""What tests of a serving container ask it, and what its log may hold."""

from __future__ import annotations

import re

from tests.support.docker.containers import Answer, Container

KEY = "container-test-key-0123456789"
# What vLLM 0.32 always says on such a machine. Without privileges it may not bind memory to NUMA
# nodes; the engine's limit of open files may be low; the demo asks for eager mode and for greedy
# sampling; Triton has no CPU backend.
ALLOWED = re.compile(
    r"numa_migrate_pages|numa_set_membind|[gs]et_mempolicy|Errno 24"
    r"|Enforce eager set|Inductor compilation was disabled"
    r"|Default vLLM sampling parameters have been overridden by the model's"
    r"|Triton is not installed|Model Runner V2 requires Triton|Reset SSM cache type"
    # oneDNN multiplies bfloat16 with AVX-512 only (vllm 0.32 model_executor/layers/utils.py:597).
    r"|Failed to create oneDNN linear"
    r"|lib(tcmalloc|iomp) is not found in LD_PRELOAD"
    # Its reader of outputs sometimes sees the engine close after a drain that is complete (seen in
    # 1 of 2 runs).
    r"|\[async_llm\.py:906\]"
    # Its worker has a few seconds to end by itself, which a busy machine may exceed
    # (multiproc_executor.py:491).
    r"|workers still running after grace period; sending SIGTERM"
    # A busy machine may not answer the canary's questions in time; the start says so and goes on.
    r"|canary: \w+: not compared: (no answer in time|the canary's time was over)"
)
TROUBLE = re.compile(
    r"\b(WARNING|ERROR|CRITICAL)\b|Traceback|^\w*(Error|Exception):|\[nibble\] (error|warning)",
    re.M,
)


def trouble(log: str) -> str:
    """Lines of a container's log that should not be there."""
    return "\n".join(x for x in log.splitlines() if TROUBLE.search(x) and not ALLOWED.search(x))


def chat(container: Container, key: str | None, text: str, max_tokens: int = 32) -> Answer:
    message = [{"role": "user", "content": text}]
    payload = {"model": "default", "messages": message, "max_tokens": max_tokens, "temperature": 0}
    return container.request("/v1/chat/completions", payload, key)
