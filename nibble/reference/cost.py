"""Estimates the cost of a reference on this machine, and chooses what a start computes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from nibble.checkpoint import Checkpoint
from nibble.machine.hardware import Hardware
from nibble.reference.prompts import ANSWER_TOKENS, PROBE_TOKENS, QUESTIONS

AUTO_SECONDS = 60.0  # longest computation that a start begins by itself
STARTUP_S = 12.0  # to import torch and transformers and to create the module
# Seconds per weight on one core, rounded up from the measured 4.2e-9 and 2 / 64e9 (one core of a
# cloud machine, torch 2.13, 2026-11-23).
DEQUANTIZE_S = 6e-9
PRODUCT_S = 2 / 50e9  # per token too: one multiplication and one addition
# Seconds to read one float32 weight from memory with all cores, for each token of an answer (16
# cores of an H200 machine under load, 2026-11-23).
WEIGHT_READ_S = 4 / 20e9
READ_S = 1.0 / (1 << 30)  # seconds per byte of the checkpoint, from a disk with 1 GiB/s
PROMPT_TOKENS = 40  # of a question with its template
PROBE_PASSES = 3  # over the longer text: the reference, and two that measure rounding
PROCESS_BYTES = 1 << 30  # torch, transformers and the module without weights
MEMORY_SHARE = 0.5  # of what is available, at most


@dataclass(frozen=True)
class Cost:
    """Seconds and peak memory of a reference with `answer_tokens` tokens per answer.

    keeps: weights stay in memory between the tokens of an answer.
    """

    seconds: float
    peak_bytes: int
    answer_tokens: int
    keeps: bool


def estimate(
    checkpoint: Checkpoint, hardware: Hardware, answer_tokens: int = ANSWER_TOKENS
) -> Cost | None:
    """The cost of a reference, or None if the checkpoint's weights are unknown.

    Weights are kept in memory if they fit into MEMORY_SHARE of the available memory.
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
    decoded = answer_tokens - 1  # the pass over the prompt gives the first token
    answers = decoded * prompts * active * max(WEIGHT_READ_S, PRODUCT_S / cores)
    seconds = STARTUP_S + one_pass * (1 if keeps else 1 + decoded) + product * tokens + answers
    peak = whole if keeps else 8 * weights.parameters // layers + PROCESS_BYTES + head + stream
    return Cost(round(seconds, 1), peak, answer_tokens, keeps)


def affordable(checkpoint: Checkpoint, hardware: Hardware) -> tuple[Cost | None, str]:
    """The largest reference that a start computes by itself, or None, with the reason."""
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
        minutes = least.seconds / 60
        return None, f"it takes about {minutes:.0f} min, more than {AUTO_SECONDS:.0f} s"
    gib = least.peak_bytes / (1 << 30)
    return None, f"it takes {gib:.1f} GiB, more than half of the available memory"
