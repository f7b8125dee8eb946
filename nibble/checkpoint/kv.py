"""Memory of one sequence on one GPU: K and V, latents and states, in vLLM 0.32's pages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from nibble.checkpoint.layer_memory import LayerMemory, Layers

MIN_KERNEL_BLOCK = 16  # FlashAttention, FlashInfer and Triton take multiples of it
MLA_HYBRID_BLOCK = 128  # vllm 0.32 platforms/interface.py:1080

# (bits of a key element, bits of a value element); vllm 0.32 turboquant/config.py
TURBOQUANT: Mapping[str, tuple[int, int]] = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
TURBOQUANT_BOUNDARY = 2  # first and last layers keep the model's type (config.py:171)
PER_TOKEN_HEAD: Mapping[str, int] = {
    "int4_per_token_head": 4,
    "int8_per_token_head": 8,
    "fp8_per_token_head": 8,
}
MLA_PACKED: Mapping[str, int] = {
    "fp8_ds_mla": 656,
    "nvfp4_ds_mla": 352,
}  # bytes a token; mla_attention.py:1370
SCALE_BYTES = 4
ATTENTION = ("full", "sliding", "mla")
MODEL_BYTES = 2  # of the model's own type: vLLM runs float32 checkpoints in 16 bits too


@dataclass(frozen=True)
class SequenceMemory:
    """Bytes of one sequence on one GPU, and where they are: kind of layer -> bytes ("draft" for
    MTP layers).
    """

    total_bytes: int
    by_kind: Mapping[str, int]
    block_size: int
    bytes_per_token: int


def token_bytes(layer: LayerMemory, kv_cache_dtype: str, tensor_parallel_size: int) -> int:
    """Bytes one token takes in one attention layer on one GPU. Raises ValueError for an unknown
    dtype.
    """
    if layer.kind == "mla":
        return _latent_bytes(layer, kv_cache_dtype)
    # Fewer KV heads than GPUs: each GPU keeps one, replicated (vllm 0.32 config/model.py:1670).
    heads = _heads_of_rank(layer.num_kv_heads, tensor_parallel_size)
    return heads * _pair_bytes(layer, kv_cache_dtype)


def _latent_bytes(layer: LayerMemory, dtype: str) -> int:
    if dtype in MLA_PACKED:
        return MLA_PACKED[dtype]
    if dtype in PER_TOKEN_HEAD:
        return layer.head_dim * PER_TOKEN_HEAD[dtype] // 8 + 2 * SCALE_BYTES
    if dtype in TURBOQUANT or dtype.startswith("nvfp4"):
        raise ValueError(f"{dtype} does not work with latent attention")
    return layer.head_dim * _element_bytes(dtype)


def _heads_of_rank(heads: int, ranks: int) -> int:
    """Key heads in the cache of one rank.

    Only CloverLM runs where neither number divides the other: 7 heads on 2 or 4 ranks. Each rank
    then keeps one head for each half of a group or for each query: 7 again
    (kernels/…/cloverlm/projection.py).
    """
    return max(1, heads // ranks) if heads % ranks == 0 or ranks % heads == 0 else heads


def _pair_bytes(layer: LayerMemory, dtype: str) -> int:
    """K and V of one head and token."""
    both = layer.head_dim + layer.head_dim_v
    if dtype.startswith("nvfp4"):  # 4-bit values and an E4M3 scale for each 16; torch_utils.py:556
        return both // 2 + both // 16
    if dtype in PER_TOKEN_HEAD:
        return both * PER_TOKEN_HEAD[dtype] // 8 + 2 * SCALE_BYTES
    if dtype in TURBOQUANT:
        return _turboquant_bytes(layer.head_dim, *TURBOQUANT[dtype])
    return both * _element_bytes(dtype)


def _turboquant_bytes(dim: int, key_bits: int, value_bits: int) -> int:
    key = dim if key_bits == 8 else math.ceil(dim * key_bits / 8) + 2  # and the vector's norm
    slot = key + math.ceil(dim * value_bits / 8) + 4  # and scale and zero point
    return slot + slot % 2


def _element_bytes(dtype: str) -> int:
    if dtype == "auto":
        return MODEL_BYTES
    if dtype in ("bfloat16", "float16", "half"):
        return 2
    if dtype in ("float32", "float"):
        return 4
    if dtype.startswith("fp8") or dtype == "int8":
        return 1
    raise ValueError(f"no KV cache dtype {dtype!r} is known")


def state_bytes(layer: LayerMemory, tensor_parallel_size: int, speculative_tokens: int = 0) -> int:
    """Bytes of one copy of a layer's recurrent state on one GPU (vllm 0.32 mamba_utils.py, state
    shapes).
    """
    state = layer.state
    if state is None:
        return 0
    tp = tensor_parallel_size
    groups = state.groups if state.groups % tp == 0 else tp
    channels = (state.conv_channels + 2 * state.group_size * groups) // tp
    rows = state.conv_rows + (speculative_tokens if state.grows_with_speculation else 0)
    temporal = state.temporal_elements // tp * (state.temporal_bytes or MODEL_BYTES)
    return channels * rows * MODEL_BYTES + temporal


def sequence_memory(
    layers: Layers,
    tokens: int,
    kv_cache_dtype: str = "auto",
    tensor_parallel_size: int = 1,
    block_size: int = MIN_KERNEL_BLOCK,
    *,
    speculative_tokens: int = 0,
    prefix_caching: bool = True,
    in_flight_tokens: int = 1,
) -> SequenceMemory:
    """Memory of a sequence of `tokens` on each of `tensor_parallel_size` GPUs.

    `block_size` is vLLM's (16 on CUDA, 128 on the CPU); a hybrid model's is raised as vLLM does.
    `in_flight_tokens` are those scheduled beyond a sliding window: 1 while decoding, vLLM's
    --max-num-batched-tokens for what it reserves at start. With `speculative_tokens` draft layers
    and extra state copies count. The sum is over layers; vLLM may round it up to groups of equal
    layers.
    """
    used = [layer for layer in layers if speculative_tokens or not layer.is_draft]
    dtypes = _dtypes(used, kv_cache_dtype)
    block, state_page = _hybrid_block(
        used, dtypes, tensor_parallel_size, block_size, speculative_tokens
    )
    # vllm 0.32 config/model.py:2260: without any attention layer prefix caching is off.
    has_attention = any(layer.kind in ATTENTION for layer in used)
    by_kind: dict[str, int] = {}
    per_token = 0
    for layer, dtype in zip(used, dtypes, strict=True):
        amount = 0
        if layer.kind == "state":
            copies = _state_copies(layer, prefix_caching and has_attention) + speculative_tokens
            amount = copies * max(
                state_page, state_bytes(layer, tensor_parallel_size, speculative_tokens)
            )
        elif layer.kind in ATTENTION:
            each = token_bytes(layer, dtype, tensor_parallel_size)
            amount = _blocks(layer, tokens, block, in_flight_tokens) * block * each
            per_token += each if layer.window is None else 0
        kind = "draft" if layer.is_draft else layer.kind
        if amount:
            by_kind[kind] = by_kind.get(kind, 0) + amount
    return SequenceMemory(sum(by_kind.values()), by_kind, block, per_token)


def block_bytes(
    layers: Layers,
    kv_cache_dtype: str = "auto",
    tensor_parallel_size: int = 1,
    block_size: int = MIN_KERNEL_BLOCK,
    *,
    speculative_tokens: int = 0,
) -> int | None:
    """Bytes of one block of the cache on one GPU, for a model that keeps states; else None.

    vLLM 0.32 divides equal layers into groups of one size (kv_cache_utils.py:1362). A block has a
    page for each layer of a group, so it holds the states of one group.
    """
    used = [layer for layer in layers if speculative_tokens or not layer.is_draft]
    states = [layer for layer in used if layer.kind == "state"]
    if not states:
        return None
    dtypes = _dtypes(used, kv_cache_dtype)
    _, page = _hybrid_block(used, dtypes, tensor_parallel_size, block_size, speculative_tokens)
    page = max(
        page, *(state_bytes(layer, tensor_parallel_size, speculative_tokens) for layer in states)
    )
    counts = Counter(
        (layer.kind, layer.window, layer.state)
        for layer in used
        if layer.kind == "state" or layer.kind in ATTENTION
    )
    return page * _pages_of_block(list(counts.values()))


def _pages_of_block(counts: list[int]) -> int:
    """The most layers in one of vLLM's groups, of `counts` layers of each kind."""
    least, most = min(counts), max(counts)
    size = most if most < least * 1.5 else least
    return max(-(-count // -(-count // size)) for count in counts)


def _dtypes(layers: list[LayerMemory], dtype: str) -> list[str]:
    """The cache type of each layer: TurboQuant excludes the first and last two layers of a dense
    model.
    """
    if dtype not in TURBOQUANT or any(layer.kind == "state" for layer in layers):
        return [dtype] * len(layers)
    count = sum(not layer.is_draft for layer in layers)
    kept = min(TURBOQUANT_BOUNDARY, count // 2)
    boundary = {*range(kept), *range(count - kept, count)}
    return ["auto" if layer.index in boundary else dtype for layer in layers]


def _state_copies(layer: LayerMemory, prefix_caching: bool) -> int:
    """Copies of a state: one; with prefix caching another for the last block boundary (vllm 0.32
    kv_cache_interface.py MambaSpec), and for Mamba2 a third for the end of the prompt
    (mamba_mixer2.py:1106).
    """
    if not prefix_caching:
        return 1
    return 3 if layer.state and layer.state.flavor == "mamba2" else 2


def _blocks(layer: LayerMemory, tokens: int, block_size: int, in_flight_tokens: int) -> int:
    """Pages of a layer: all tokens, or the window and the tokens in flight (vllm 0.32
    kv_cache_interface.py:854).
    """
    if layer.window is None:
        return -(-tokens // block_size)
    held = min(layer.window - 1 + in_flight_tokens, tokens)
    return -(-held // block_size) + 1  # a window may begin inside a block


def _hybrid_block(
    layers: list[LayerMemory],
    dtypes: list[str],
    tensor_parallel_size: int,
    block_size: int,
    speculative_tokens: int,
) -> tuple[int, int]:
    """(block size, bytes of a state's page): in hybrid models one attention page must hold one
    state.

    vllm 0.32 platforms/interface.py _align_hybrid_block_size. (block_size, 0) where nothing needs
    aligning.
    """
    pages = [
        state_bytes(layer, tensor_parallel_size, speculative_tokens)
        for layer in layers
        if layer.kind == "state"
    ]
    attention = [
        (layer, token_bytes(layer, dtype, tensor_parallel_size))
        for layer, dtype in zip(layers, dtypes, strict=True)
        if layer.kind in ATTENTION and not layer.is_draft
    ]
    if not pages or not attention:
        return block_size, 0
    each = max(size for _, size in attention)
    unit = max(MIN_KERNEL_BLOCK, block_size)
    if any(layer.kind == "mla" for layer, _ in attention):
        unit = max(unit, MLA_HYBRID_BLOCK)
    block = max(block_size, unit * -(-max(pages) // (unit * each)))
    return block, block * each
