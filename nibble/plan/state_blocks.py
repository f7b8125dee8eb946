"""The most sequences whose states fit in vLLM's KV cache. Pure.

Layers with recurrent state (Mamba, gated delta net, short convolution) need a block of the cache
for each sequence. With full CUDA graphs vLLM 0.32 ends a start whose --max-num-seqs is above the
number of blocks (config/compilation.py:1511), also where that is its own default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nibble.checkpoint import Checkpoint, block_bytes
from nibble.errors import ExitCode, NibbleError
from nibble.plan.budget import Budget, CacheShape, memory_bytes
from nibble.plan.choice import Choice, Layer
from nibble.plan.inputs import PlanInputs
from nibble.plan.memory import GIB, KV, MIB, SOURCE, cache_shape, number_of
from nibble.plan.situation import Decision, Situation

SEQUENCES = "--max-num-seqs"
BLOCKS = "--num-gpu-blocks-override"
# vllm 0.32 engine/arg_utils.py:2926
LARGE_GPU_BYTES, LARGE_GPU_SEQUENCES, OTHER_GPU_SEQUENCES = 70 * GIB, 1024, 256
WITHOUT_FULL_GRAPHS = ("NONE", "PIECEWISE")


def limit_sequences(situation: Situation) -> Decision:
    """Lower --max-num-seqs to what the cache has blocks for. Raises NO_FIT where a user's own
    number is above it.
    """
    inputs, args, memory = situation.served, situation.flags, situation.memory
    if memory is None or inputs.target.device != "cuda" or not _has_full_graphs(args):
        return Decision()
    shape, ranks = cache_shape(inputs, args), number_of(args, "--pipeline-parallel-size", 1)
    each = state_block_bytes(inputs.checkpoint, shape)
    blocks = _blocks(args, memory.budget, -(-each // ranks)) if each else None
    if each is None or blocks is None:
        return Decision()
    least, most = blocks
    choice = args.get(SEQUENCES)
    wanted = int(choice.value) if choice else default_sequences(inputs, args)
    if wanted is None or wanted <= least:
        return Decision()
    about = "" if least == most else "about "
    reason = (
        f"vLLM starts only with a block of the KV cache for each sequence's states, and there are"
        f" {about}{least} blocks of {each / ranks / MIB:.1f} MiB"
    )
    if choice is not None and choice.layer >= Layer.FILE:
        if wanted <= most:
            return Decision(notices=(f"MAX_NUM_SEQS is {wanted}: {reason}",))
        raise NibbleError(
            ExitCode.NO_FIT,
            what=f"MAX_NUM_SEQS is {wanted}: {reason}",
            expected=f"at most {least}",
            action="lower MAX_NUM_SEQS or --max-num-seqs",
        )
    budget = memory.budget
    if budget.sequences is not None:
        memory = replace(memory, budget=replace(budget, sequences=least))
    return Decision({SEQUENCES: Choice(least, SOURCE, reason, Layer.LIMIT)}, memory=memory)


def state_block_bytes(checkpoint: Checkpoint | None, shape: CacheShape) -> int | None:
    """Bytes of a block of the cache on one GPU that has all layers; None without states."""
    if checkpoint is None or checkpoint.layers is None:
        return None
    dtype = shape.kv_cache_dtype
    if dtype == "auto":
        dtype = checkpoint.scheme.kv_cache or dtype
    return block_bytes(
        checkpoint.layers,
        dtype,
        shape.tensor_parallel_size,
        shape.block_size,
        speculative_tokens=shape.speculative_tokens,
    )


def default_sequences(inputs: PlanInputs, args: Mapping[str, Choice]) -> int | None:
    """vLLM's --max-num-seqs where nothing sets it; None for an unknown GPU."""
    total, _ = memory_bytes(inputs.target, inputs.hardware)
    if total is None:
        return None
    sequences = LARGE_GPU_SEQUENCES if total >= LARGE_GPU_BYTES else OTHER_GPU_SEQUENCES
    mode = args.get("--performance-mode")
    if mode is not None and mode.value == "throughput":
        sequences *= 2
    return min(sequences, number_of(args, "--max-num-batched-tokens", sequences))


def _has_full_graphs(args: Mapping[str, Choice]) -> bool:
    if "--enforce-eager" in args and args["--enforce-eager"].value is True:
        return False
    choice = args.get("--compilation-config")
    config = choice.value if choice and isinstance(choice.value, Mapping) else {}
    if "cudagraph_mode" in config:
        return str(config["cudagraph_mode"]).upper() not in WITHOUT_FULL_GRAPHS
    level = args.get("--optimization-level")
    return level is None or str(level.value) not in ("0", "1")  # vllm 0.32 config/vllm.py


def _blocks(args: Mapping[str, Choice], budget: Budget, each: int) -> tuple[int, int] | None:
    """The least and the most blocks that vLLM's cache can have.

    They are equal if the cache's size is set. Else vLLM measures what the engine takes, and the
    estimate of that may be wrong by its own size.
    """
    if given := number_of(args, BLOCKS, 0):
        return given, given
    kv = int(args[KV].value) if KV in args else budget.kv_cache_bytes
    if kv is not None:
        return _count(kv, each), _count(kv, each)
    room, overhead = budget.room_bytes, budget.overhead_bytes
    if room is None or room <= 0:
        return None
    return _count(max(room - overhead, room // 2), each), _count(room + overhead, each)


def _count(kv_bytes: int, each: int) -> int:
    return max(1, kv_bytes // each)
