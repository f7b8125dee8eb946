"""Memory and speed arithmetic of a plan: need, supply, and the bandwidth bound of decoding.

Pure. Every figure is in bytes of one GPU (or of the host on a CPU) unless its name says otherwise.
Figures that depend on an unknown checkpoint are None and printed as "unknown until pull".
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from nibble.checkpoint import Checkpoint, sequence_memory_bytes
from nibble.machine.hardware import Gpu, Hardware
from nibble.machine.targets import Target

GIB = 1 << 30
# The default reserve is at most this share of a machine's memory. NIBBLE_MEMORY_RESERVE_GIB has no
# such limit.
LARGEST_SHARE_RESERVED = 1 / 8
# With a discrete GPU: checkpoints are staged in host memory, some of it pinned.
HOST_RESERVE_BYTES = 2 * GIB


@dataclass(frozen=True)
class Budget:
    """One device's memory, as `nibble plan` prints it.

    `allowed_bytes` is what the engine may take: the available memory less the reserve, and at most
    the cap (`cap` is a fraction of the whole memory, from GPU_MEMORY_UTIL or a recipe).
    `room_bytes` is the rest for the KV cache after weights, engine, graphs and workspace.
    `kv_cache_bytes` is a size that the user or a recipe sets.
    """

    memory_bytes: int | None
    available_bytes: int | None
    limited_by: str
    cap: float | None
    allowed_bytes: int | None
    reserve_bytes: int
    reserve_reason: str
    engine_bytes: int
    graphs_bytes: int
    workspace_bytes: int
    weights_bytes: int | None
    sequence_bytes: int | None
    sequence_tokens: int | None
    sequences: int | None
    kv_cache_bytes: int | None
    room_bytes: int | None
    sequences_that_fit: float | None

    @property
    def overhead_bytes(self) -> int:
        """What the engine takes besides weights and KV cache."""
        return self.engine_bytes + self.graphs_bytes + self.workspace_bytes

    @property
    def is_capped(self) -> bool:
        """Whether the cap leaves less than the available memory would."""
        if self.cap is None or self.memory_bytes is None or self.available_bytes is None:
            return False
        return int(self.cap * self.memory_bytes) < self.available_bytes - self.reserve_bytes

    @property
    def least_kv_bytes(self) -> int:
        """The smallest useful KV cache: the set size, else one sequence of full length."""
        return self.kv_cache_bytes or self.sequence_bytes or 0

    @property
    def full_kv_bytes(self) -> int | None:
        """The KV cache for all sequences at full length; None if unknown."""
        if self.kv_cache_bytes is not None:
            return self.kv_cache_bytes
        if self.sequence_bytes is None or self.sequences is None:
            return None
        return self.sequences * self.sequence_bytes

    @property
    def missing_bytes(self) -> int:
        """Bytes that the smallest KV cache lacks; 0 if it fits or its size is unknown."""
        return max(0, self.least_kv_bytes - self.room_bytes) if self.room_bytes is not None else 0

    def free_share(self) -> float | None:
        """The largest fraction with which vLLM's check at start passes, rounded down; None if
        unknown.

        vllm 0.32 v1/worker/utils.py:761 refuses to start unless this fraction of the whole memory
        is free, also with a KV cache given in bytes. By then the engine's processes have taken
        their share.
        """
        if not self.memory_bytes or self.available_bytes is None:
            return None
        free = self.available_bytes - self.reserve_bytes - self.engine_bytes
        return math.floor(100 * free / self.memory_bytes) / 100

    def used_share(self, kv_bytes: int | None) -> float | None:
        """The fraction that weights, graphs, workspace and a KV cache of `kv_bytes` take, rounded
        up; None if unknown.
        """
        if not self.memory_bytes or self.weights_bytes is None or kv_bytes is None:
            return None
        used = self.weights_bytes + self.graphs_bytes + self.workspace_bytes + kv_bytes
        return math.ceil(100 * used / self.memory_bytes) / 100

    def to_json(self) -> dict[str, Any]:
        """Plain data for --json."""
        return asdict(self)


@dataclass(frozen=True)
class DecodeBound:
    """Upper bound of decode speed for one sequence without speculative decoding: bandwidth / bytes
    read in a step.
    """

    bytes_per_step: int | None
    bandwidth_bytes_per_s: float | None
    tokens_per_s: float | None
    note: str

    def to_json(self) -> dict[str, Any]:
        """Plain data for --json."""
        return asdict(self)


def memory_bytes(
    target: Target, hardware: Hardware, gpus: int | None = None
) -> tuple[int | None, int | None]:
    """(total, available now) bytes of the memory that holds the weights. With several GPUs: those
    of the GPU with the least free memory among the first `gpus` (None: all).
    """
    if is_shared(target) or not hardware.gpus:
        return hardware.memory_total_bytes, hardware.memory_available_bytes
    fullest = min(hardware.gpus[:gpus], key=lambda gpu: _free_bytes(gpu) or 0)
    return fullest.memory_bytes, _free_bytes(fullest)


def _free_bytes(gpu: Gpu) -> int | None:
    return gpu.memory_bytes if gpu.memory_free_bytes is None else gpu.memory_free_bytes


def is_shared(target: Target) -> bool:
    """Whether the engine uses the host's memory, so that using too much harms the whole machine."""
    return target.memory.kind in ("unified", "host")


def weights_bytes_per_gpu(
    checkpoint: Checkpoint | None, gpus: int, replicas: int = 1
) -> int | None:
    """Bytes of weights on each of `gpus` GPUs, assuming an even split. Replicated norms and routers
    are below 1 %.

    Each data parallel replica holds everything except the experts, which are divided over all
    replicas, with and without expert parallelism (vllm 0.32 fused_moe/config.py
    flatten_tp_across_dp_and_pcp). vLLM loads float32 files in 16 bits, so a parameter counts as two
    bytes at most.
    """
    if checkpoint is None or checkpoint.weights is None:
        return None
    weights = checkpoint.weights
    total = min(weights.total_bytes, 2 * weights.parameters)
    if replicas == 1:
        return -(-total // gpus)
    scales = weights.bytes_by_kind.get("scales", 0)
    share = weights.bytes_by_kind.get("moe_experts", 0) / max(1, weights.total_bytes - scales)
    experts = int(total * share)  # scales are divided like the weights
    return -(-(total - experts) // gpus) + -(-experts // (gpus * replicas))


@dataclass(frozen=True)
class CacheShape:
    """What determines a sequence's memory besides the model; names and units of
    `sequence_memory_bytes`.
    """

    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    block_size: int = 16
    speculative_tokens: int = 0
    prefix_caching: bool = True
    in_flight_tokens: int = 1


def sequence_bytes(
    checkpoint: Checkpoint | None, tokens: int | None, shape: CacheShape
) -> int | None:
    """Bytes of KV cache and state for one sequence of `tokens`; None for an unknown
    architecture.
    """
    if checkpoint is None or tokens is None:
        return None
    return sequence_memory_bytes(checkpoint, tokens, **asdict(shape))


def reserve(target: Target, hardware: Hardware, user_bytes: int | None) -> tuple[int, str]:
    """(bytes to leave free, the reason). `user_bytes` is the user's value, None if unset."""
    if user_bytes is not None:
        return user_bytes, "set by the user"
    total, _ = memory_bytes(target, hardware)
    limit = int((total or 0) * LARGEST_SHARE_RESERVED)
    if total and limit < target.memory.reserve_bytes:
        return limit, f"an eighth of this memory; {target.memory.reserve_reason}"
    return target.memory.reserve_bytes, target.memory.reserve_reason


def host_reserve_bytes(target: Target, host_total_bytes: int, user_bytes: int | None) -> int:
    """Bytes of host memory that the watchdog keeps free. With a discrete GPU the budget is about
    the GPU's memory instead.
    """
    if user_bytes is not None:
        return user_bytes
    default = target.memory.reserve_bytes if is_shared(target) else HOST_RESERVE_BYTES
    return min(default, int(host_total_bytes * LARGEST_SHARE_RESERVED))


def make_budget(
    target: Target,
    hardware: Hardware,
    checkpoint: Checkpoint | None,
    *,
    cap: float | None,
    reserve_bytes: int | None,
    tokens: int | None,
    sequences: int | None,
    shape: CacheShape,
    gpus_per_model: int,
    replicas: int,
    ranks_here: int,
    graphs_bytes: int,
    kv_cache_bytes: int | None,
    kernels_bytes: int = 0,
    copies_bytes: int = 0,
) -> Budget:
    """Combine the available memory with what the model needs. `kv_cache_bytes` is for one device,
    None if unset; `kernels_bytes`: workspace of nibble's kernels beside the target's estimate;
    `copies_bytes`: weights that the engine holds beside the checkpoint's.

    On a CPU all ranks of this machine, including those of data parallel `replicas`, share one
    memory, so each rank's need is multiplied by their number.
    """
    total, available = memory_bytes(target, hardware, ranks_here)
    reserved, reason = reserve(target, hardware, reserve_bytes)
    ranks = ranks_here if target.memory.kind == "host" else 1
    weights = weights_bytes_per_gpu(checkpoint, gpus_per_model, replicas)
    sequence = sequence_bytes(checkpoint, tokens, shape)
    budget = Budget(
        memory_bytes=total,
        available_bytes=available,
        limited_by=hardware.memory_limited_by if is_shared(target) else "NVML",
        cap=cap,
        allowed_bytes=None,
        reserve_bytes=reserved,
        reserve_reason=reason,
        engine_bytes=target.memory.engine_bytes * ranks,
        graphs_bytes=graphs_bytes,
        workspace_bytes=target.memory.workspace_bytes * ranks + kernels_bytes,
        weights_bytes=weights and (weights + copies_bytes) * ranks,
        sequence_bytes=sequence and sequence * ranks,
        sequence_tokens=tokens,
        sequences=sequences,
        kv_cache_bytes=kv_cache_bytes and kv_cache_bytes * ranks,
        room_bytes=None,
        sequences_that_fit=None,
    )
    if total is None or available is None:
        return budget
    allowed = available - reserved if cap is None else min(available - reserved, int(cap * total))
    if budget.weights_bytes is None:
        return replace(budget, allowed_bytes=allowed)
    room = allowed - budget.weights_bytes - budget.overhead_bytes
    fit = room / budget.sequence_bytes if budget.sequence_bytes else None
    return replace(budget, allowed_bytes=allowed, room_bytes=room, sequences_that_fit=fit)


def make_bound(
    target: Target,
    hardware: Hardware,
    checkpoint: Checkpoint | None,
    gpus_per_model: int,
    bytes_not_read: int = 0,
) -> DecodeBound:
    """The decode bound on these GPUs, or why it is unknown. `bytes_not_read`: of the checkpoint's,
    because a smaller copy is read.
    """
    step = checkpoint.weights.decode_bytes_per_step if checkpoint and checkpoint.weights else None
    step = step and step - bytes_not_read
    model = target.gpu_model(hardware.gpus[0].name) if hardware.gpus else None
    if target.device == "cpu":
        return _bound_of_cpu(step, hardware)
    if model is None:
        name = hardware.gpus[0].name if hardware.gpus else "no GPU"
        return DecodeBound(step, None, None, f"the bandwidth of {name} is unknown")
    bandwidth = model.bandwidth_bytes_per_s * gpus_per_model
    if not step:
        return DecodeBound(
            step,
            bandwidth,
            None,
            "unknown until pull" if step is None else "the weights are unknown",
        )
    note = f"{model.bandwidth_bytes_per_s / 1e9:.0f} GB/s x {gpus_per_model} GPU ({model.source})"
    return DecodeBound(step, bandwidth, bandwidth / step, note)


def _bound_of_cpu(step: int | None, hardware: Hardware) -> DecodeBound:
    bandwidth, cores = hardware.read_bytes_per_s, hardware.compute
    if bandwidth is None or cores is None:
        note = "the memory bandwidth of this CPU is unknown until a server starts"
        return DecodeBound(step, None, None, note)
    note = f"{cores.threads} cores read {bandwidth / 1e9:.1f} GB/s, measured at a start"
    return DecodeBound(step, bandwidth, bandwidth / step if step else None, note)
