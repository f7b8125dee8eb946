"""The rank of a token among log-probs on vLLM's CPU platform, without a compiler.

vLLM 0.32 compiles this count (v1/sample/ops/logprobs.py:11), so that a GPU needs no copy of the
logits. On a CPU the first request for log-probs waits for the compiler, 1.5 s on two cores with a
warm cache and more without: the canary sends that request, so every start waits. The numbers are
integers, and the same.
"""

from __future__ import annotations

from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.sample import sampler

from nibble.engine.plugin.require import replace


def count_without_compiler() -> None:
    """Replace batched_count_greater_than for the sampler. Raises VllmMismatch."""
    if current_platform.is_cpu():
        name = "batched_count_greater_than"  # a name in that module's namespace
        replace(sampler, name, count_at_least, "x", "values")


def count_at_least(x: Tensor, values: Tensor) -> Tensor:
    """The elements of each row of x (rows, n) that are not below the row's value (rows, 1)."""
    return (x >= values).sum(-1)
