"""Which layers and batches nibble's decode attention takes, and its memory. Pure.

The plan and the plugin (engine/plugin/attention) both decide with it.
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIMS = (64, 128, 256)
MOST_GROUP = 16  # query heads of a KV head
MOST_QUERIES = 8  # tokens of a request in one step
CACHES = ("auto", "bfloat16", "fp8", "fp8_e4m3")
# Requests of a step up to which the choice `few` takes the kernel.
FEW = 1
# What `auto` takes it for: on SM90 these head dims have kernels for few and for many requests.
AUTO_HEAD_DIMS = (128, 256)
AUTO_CACHES = ("bfloat16", "fp8", "fp8_e4m3")
# Of partial results. A larger batch takes several launches.
WORKSPACE_BYTES = 160 << 20
# Tokens of a page are a multiple of this.
PAGE = 16


@dataclass(frozen=True)
class AttentionShape:
    """A layer's heads, and its cache as vLLM names it."""

    head_dim: int
    value_dim: int
    heads: int
    kv_heads: int
    cache: str

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads


def refusal_of_shape(shape: AttentionShape) -> str:
    """Why nibble's kernel cannot compute such a layer; empty if it can."""
    if shape.head_dim != shape.value_dim:
        return f"keys have {shape.head_dim} elements and values {shape.value_dim}"
    if shape.head_dim not in HEAD_DIMS:
        return f"its head dim is {shape.head_dim}, not {', '.join(map(str, HEAD_DIMS))}"
    if shape.heads % shape.kv_heads or shape.group > MOST_GROUP:
        return f"{shape.heads} query heads on {shape.kv_heads} are more than {MOST_GROUP} each"
    if shape.cache not in CACHES:
        return f"its KV cache is {shape.cache}, not bfloat16 or fp8"
    return ""


def most_queries(draft_tokens: int) -> int:
    """The most query tokens of a request in a decode step; 0 if the kernel takes fewer."""
    queries = 1 + draft_tokens
    return queries if queries <= MOST_QUERIES else 0


def is_decode_batch(queries: int, limit: int, causal: object) -> bool:
    """Whether a batch whose requests have up to `queries` query tokens is of decode steps.

    With the number of requests this alone decides whether the kernel computes it, because a CUDA
    graph repeats the answer. `causal` is a tensor where requests differ.
    """
    return 0 < queries <= limit and causal is True


def most_requests(choice: str, of_engine: int) -> int:
    """Up to how many requests of a step the kernel computes, with the option attention_kernel."""
    return min(FEW, of_engine) if choice == "few" else of_engine


def sequences_at_a_time(bytes_each: int, most: int) -> int:
    """How many sequences one launch takes, of at most `most`."""
    return max(1, min(most, WORKSPACE_BYTES // bytes_each))
