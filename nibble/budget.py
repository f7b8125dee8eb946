"""Memory and speed arithmetic of a plan: what is needed, what there is, and the decode bound by bandwidth.

Pure; every figure is bytes of one GPU (or of the host on a CPU) unless its name says otherwise. What a checkpoint
that is not here would decide stays None and is printed as "unknown until pull".
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nibble.checkpoint import Checkpoint, sequence_memory_bytes
from nibble.hardware import Hardware
from nibble.targets import Target


@dataclass(frozen=True)
class Budget:
    """One GPU's memory, as `nibble plan` prints it.

    `allowed_bytes` is what vLLM may take (memory times the utilization, less where the machine has less free),
    `room_bytes` what is left of it for the KV cache after weights and reserve.
    """

    memory_bytes: int | None
    available_bytes: int | None
    allowed_bytes: int | None
    reserve_bytes: int
    weights_bytes: int | None
    sequence_bytes: int | None
    sequence_tokens: int | None
    room_bytes: int | None
    sequences_that_fit: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain data for --json."""
        return asdict(self)


@dataclass(frozen=True)
class DecodeBound:
    """Upper bound of decode speed for one sequence: bandwidth / bytes a step reads, no speculative decoding."""

    bytes_per_step: int | None
    bandwidth_bytes_per_s: float | None
    tokens_per_s: float | None
    note: str

    def to_json(self) -> dict[str, Any]:
        """Plain data for --json."""
        return asdict(self)


def memory_bytes(target: Target, hardware: Hardware) -> tuple[int | None, int | None]:
    """(total, available now) bytes of the memory weights live in."""
    if target.memory_kind in ("unified", "host") or not hardware.gpus:
        return hardware.memory_total_bytes, hardware.memory_available_bytes
    smallest = min(hardware.gpus, key=lambda gpu: gpu.memory_bytes or 0)
    return smallest.memory_bytes, smallest.memory_free_bytes or smallest.memory_bytes


def weights_bytes_per_gpu(checkpoint: Checkpoint | None, gpus: int) -> int | None:
    """Bytes of weights on each of `gpus` GPUs; an even split, replicated norms and routers are below 1 %."""
    if checkpoint is None or checkpoint.weights is None:
        return None
    return -(-checkpoint.weights.total_bytes // gpus)


@dataclass(frozen=True)
class CacheShape:
    """What decides the memory of a sequence beside the model; names and units of `sequence_memory_bytes`."""

    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    block_size: int = 16
    speculative_tokens: int = 0
    prefix_caching: bool = True
    in_flight_tokens: int = 1


def sequence_bytes(checkpoint: Checkpoint | None, tokens: int | None, shape: CacheShape) -> int | None:
    """Bytes of KV cache and state one sequence of `tokens` takes, or None where the architecture is not known."""
    if checkpoint is None or tokens is None:
        return None
    return sequence_memory_bytes(checkpoint, tokens, **asdict(shape))


def make_budget(
    target: Target,
    hardware: Hardware,
    checkpoint: Checkpoint | None,
    *,
    utilization: float | None,
    reserve_bytes: int,
    tokens: int | None,
    shape: CacheShape,
    gpus_per_model: int,
) -> Budget:
    """Join what is there with what the model needs. `utilization` None means vLLM's own limit does not apply."""
    total, available = memory_bytes(target, hardware)
    allowed = None
    if total is not None and available is not None:
        allowed = available if utilization is None else min(int(total * utilization), available)
    weights = weights_bytes_per_gpu(checkpoint, gpus_per_model)
    sequence = sequence_bytes(checkpoint, tokens, shape)
    room = None if allowed is None or weights is None else allowed - weights - reserve_bytes
    fit = room / sequence if room is not None and sequence else None
    return Budget(total, available, allowed, reserve_bytes, weights, sequence, tokens, room, fit)


def make_bound(
    target: Target, hardware: Hardware, checkpoint: Checkpoint | None, gpus_per_model: int
) -> DecodeBound:
    """The decode bound on the GPUs found, or why there is none."""
    step = checkpoint.weights.decode_bytes_per_step if checkpoint and checkpoint.weights else None
    model = target.gpu_model(hardware.gpus[0].name) if hardware.gpus else None
    if target.device == "cpu":
        return DecodeBound(step, None, None, "memory bandwidth of this CPU is not known")
    if model is None:
        name = hardware.gpus[0].name if hardware.gpus else "no GPU"
        return DecodeBound(step, None, None, f"no bandwidth is recorded for {name}")
    bandwidth = model.bandwidth_bytes_per_s * gpus_per_model
    if step is None:
        return DecodeBound(None, bandwidth, None, "unknown until pull")
    note = f"{model.bandwidth_bytes_per_s / 1e9:.0f} GB/s x {gpus_per_model} GPU ({model.source})"
    return DecodeBound(step, bandwidth, bandwidth / step, note)
