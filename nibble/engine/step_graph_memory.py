"""How much GPU memory the CUDA graphs of whole steps may take. Pure.

The plan reserves this memory, vLLM's KV cache leaves it free, and the plugin stops capturing at it
(nibble/engine/plugin/step_graph).
"""

from __future__ import annotations

from typing import Literal

MIB = 1 << 20
MOST_REQUESTS = 128  # of a step from graphs; beyond, the GPU's time exceeds the host's
MOST_SAMPLERS = 512  # captured combinations of batch size and sampling parameters
# Fewer are not worth a release: they would be captured again at once.
LEAST_RELEASED = 16
# The sampler's graphs share one pool, which holds one batch's logits: BF16, float32, the processed
# ones, their log-probs, and sorted values with indices.
BYTES_PER_LOGIT = 2 + 4 + 4 + 4 + 4 + 8
GRAPHS_BYTES = 192 * MIB  # CUDA's own data of all graphs

# Tokens of the full graphs for prompts where MAX_NUM_SEQS is below 256. Else vLLM's sizes have such
# graphs, up to the same number. A finer grid pads less and takes longer to capture.
PROMPT_SIZES = (16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
# Beyond, FlashAttention has one part for each row, as it chooses itself for a prompt so long.
LONG_PROMPT_SIZES = (*range(576, 1025, 64), *range(1152, 2049, 128))
# FlashAttention 3's parts of a row in a CUDA graph (vllm 0.32 config/attention.py,
# flash_attn_max_num_splits_for_cuda_graph).
ATTENTION_PARTS = 32
ACTIVATIONS = 32  # of a token while a layer runs, in hidden sizes

Action = Literal["capture", "release", "stop"]


def step_graph_bytes(requests: int | None, vocabulary: int | None, drafts: int = 0) -> int:
    """The most that the graphs of an engine may take. `requests` run at a time at most; unknown
    values count as common ones. Each drafted token has its own logits.
    """
    rows = min(requests or MOST_REQUESTS, MOST_REQUESTS) * (1 + drafts)
    return rows * (vocabulary or 1 << 17) * BYTES_PER_LOGIT + GRAPHS_BYTES


def prompt_graph_bytes(heads: int, head_dim: int) -> int:
    """What the graphs for prompts add: float32 parts of attention, shared by all graphs and layers.
    `heads`: of queries, on one GPU.
    """
    return ATTENTION_PARTS * PROMPT_SIZES[-1] * heads * head_dim * 4


def long_prompt_bytes(hidden: int, tokens: int) -> int:
    """Activations in the graphs of LONG_PROMPT_SIZES, besides the kernels' workspace. All graphs of
    an 8B shape on an H200 take 0.86 GiB (benchmarks/results/serve_load_8b_h200.json).
    """
    return min(tokens, LONG_PROMPT_SIZES[-1]) * ACTIVATIONS * hidden * 2


def action_before_capture(samplers: int, taken_bytes: int, limit_bytes: int) -> Action:
    """What precedes the capture of one more sampler: nothing, the release of all, or no capture.

    samplers: captured ones; taken_bytes: of all graphs.
    """
    if samplers < MOST_SAMPLERS and taken_bytes < limit_bytes:
        return "capture"
    return "release" if samplers >= LEAST_RELEASED else "stop"
