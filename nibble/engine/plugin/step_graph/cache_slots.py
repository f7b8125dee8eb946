"""Skips the bookkeeping of cache blocks for a decode step that changes none.

For each step of each request, vLLM's scheduler asks how many blocks to free, allocate and cache
(vllm 0.32 v1/core/kv_cache_manager.py:375). With one group of full attention, the answer is none
unless the step's tokens, or those that a drafter adds, begin a block, or fill one.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_coordinator import (
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import RequestStatus

_LOOKAHEAD = frozenset({"num_lookahead_tokens"})


def skip_unchanged_blocks(manager: KVCacheManager) -> bool:
    """Let `manager` return at once where nothing changes. False where that is not known."""
    coordinator: Any = manager.coordinator
    if type(coordinator) not in (UnitaryKVCacheCoordinator, KVCacheCoordinatorNoPrefixCache):
        return False
    if [type(one) for one in coordinator.single_type_managers] != [FullAttentionManager]:
        return False
    blocks: Any = coordinator.single_type_managers[0]
    if manager.enable_caching and blocks.block_size != blocks.block_pool.hash_block_size:
        return False
    size, limit, nothing = blocks.block_size, manager.max_model_len, manager.empty_kv_cache_blocks
    of_request, cached_of, partial = (
        blocks.req_to_blocks,
        blocks.num_cached_block,
        blocks._partial_hit_reqs,
    )
    allocate, cache, caches = manager.allocate_slots, manager.cache_blocks, blocks.enable_caching

    def is_cached(request_id: str, tokens: int) -> bool:
        return not caches or tokens // size <= cached_of.get(request_id, 0)

    def allocate_slots(request: Any, num_new_tokens: int, *arguments: Any, **options: Any) -> Any:
        if (
            num_new_tokens > 0
            and not arguments
            and _LOOKAHEAD.issuperset(options)
            and request.status == RequestStatus.RUNNING
        ):
            name, tokens = request.request_id, request.num_computed_tokens + num_new_tokens
            held, most = of_request.get(name), tokens + options.get("num_lookahead_tokens", 0)
            if (
                held
                and most <= limit
                and most <= len(held) * size
                and name not in partial
                and is_cached(name, min(tokens, request.num_tokens))
            ):
                return nothing
        return allocate(request, num_new_tokens, *arguments, **options)

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        if not is_cached(request.request_id, num_computed_tokens):
            cache(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks  # type: ignore
    return True
