"""What computing a reference costs on this machine, and what a start does about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from nibble.checkpoint import Checkpoint
from nibble.machine.hardware import Hardware
from nibble.reference.prompts import ANSWER_TOKENS, PROBE_TOKENS, QUESTIONS

AUTO_SECONDS = 60.0
STARTUP_S = 12.0  # imports of torch and transformers, the module
# Seconds for a weight on one core: 4.2e-9 and 2 / 64e9 were measured (a cloud machine's core, torch
# 2.13, 2026-11-23).
DEQUANTIZE_S = 6e-9
PRODUCT_S = 2 / 50e9  # a multiplication and an addition, for each token
# A weight in float32, read for each token of an answer, by all cores together (16 of an H200
# machine beside a load, 2026-11-23).
WEIGHT_READ_S = 4 / 20e9
READ_S = 1.0 / (1 << 30)  # a byte of the checkpoint, from a disk of 1 GiB/s
PROMPT_TOKENS = 40  # of a question with its template
PROBE_PASSES = 3  # of the longer text: one, and two that measure rounding
PROCESS_BYTES = 1 << 30  # torch, transformers and the module without weights
MEMORY_SHARE = 0.5  # of what is available, at most


@dataclass(frozen=True)
class Cost:
    """Seconds and memory of a reference with `answer_tokens`; `keeps`: weights stay in memory
    between those.
    """

    seconds: float
    peak_bytes: int
    answer_tokens: int
    keeps: bool


def estimate(
    checkpoint: Checkpoint, hardware: Hardware, answer_tokens: int = ANSWER_TOKENS
) -> Cost | None:
    """None for a checkpoint whose weights are not known. Whether weights are kept follows from
    the memory that is available.
    """
    weights, layers = checkpoint.weights, checkpoint.num_layers
    if weights is None or not layers:
        return None
    prompts = len(QUESTIONS) + 1
    tokens = prompts * PROMPT_TOKENS + PROBE_PASSES * PROBE_TOKENS
    active = weights.active_parameters or weights.parameters
    cores = max(1, hardware.cpu_cores)
    head = 4 * (checkpoint.vocab_size or 0) * tokens  # logits
    stream = 4 * layers * (checkpoint.hidden_size or 0) * PROBE_TOKENS
    whole = 4 * weights.parameters + PROCESS_BYTES + head + stream
    keeps = answer_tokens > 1 and whole <= hardware.memory_available_bytes * MEMORY_SHARE
    one_pass = weights.total_bytes * READ_S + weights.parameters * DEQUANTIZE_S / cores
    product = active * PRODUCT_S / cores
    again = answer_tokens - 1
    answers = again * prompts * active * max(WEIGHT_READ_S, PRODUCT_S / cores)
    seconds = STARTUP_S + one_pass * (1 if keeps else 1 + again) + product * tokens + answers
    peak = whole if keeps else 8 * weights.parameters // layers + PROCESS_BYTES + head + stream
    return Cost(round(seconds, 1), peak, answer_tokens, keeps)


def affordable(checkpoint: Checkpoint, hardware: Hardware) -> tuple[Cost | None, str]:
    """The largest reference that a start makes by itself, else None; and why."""
    whole = estimate(checkpoint, hardware)
    if whole is None:
        return None, "the weights are unknown"
    for cost in (whole, estimate(checkpoint, hardware, 1)):
        assert cost is not None
        if (
            cost.seconds <= AUTO_SECONDS
            and cost.peak_bytes <= hardware.memory_available_bytes * MEMORY_SHARE
        ):
            return cost, f"about {cost.seconds:.0f} s and {cost.peak_bytes / (1 << 30):.1f} GiB"
    least = estimate(checkpoint, hardware, 1)
    assert least is not None
    if least.seconds > AUTO_SECONDS:
        return (
            None,
            f"it takes about {least.seconds / 60:.0f} min, more than {AUTO_SECONDS:.0f} s",
        )
    return (
        None,
        (
            f"it takes {least.peak_bytes / (1 << 30):.1f} GiB, more than half of the available"
            " memory"
        ),
    )
