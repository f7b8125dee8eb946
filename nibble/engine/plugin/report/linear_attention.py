"""Compares nibble's kernels for linear attention with their definition, on random rows and
states.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from nibble_kernels.gated_delta import HEAD, TAPS, reference
from torch import Tensor
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from nibble.engine.plugin.gated_delta import Rule, Sequences, layers_of, rule_of
from nibble.engine.plugin.report.compare import Result, compare
from nibble.engine.plugin.report.formats import generator_of

KIND = "gated delta rule"
LENGTHS = (3, 1, 18)  # of prompts: more and less than the convolution's tokens, and than a tile


def rules_of(model: Any) -> Iterator[tuple[str, Any, Rule]]:
    """Name, vLLM's layer and the kernels' arguments."""
    for layer in layers_of(model):
        if (rule := rule_of(layer)) is not None:
            yield layer.prefix, layer, rule


def rule_results(name: str, layer: Any, rule: Rule, device: torch.device) -> Iterator[Result]:
    """A decode step of some tokens, and prompts of which the first has no state."""
    tokens = sum(LENGTHS)
    random = generator_of(name)
    x = torch.randn(tokens, rule.gates.shape[1], generator=random).bfloat16()
    heads = len(rule.a_log)
    channels = rule.conv_weight.numel() // TAPS
    qkvz = torch.randn(tokens, channels + heads * HEAD, generator=random).bfloat16()
    conv_state = torch.randn(tokens + 1, channels, TAPS - 1, generator=random).bfloat16()
    state = torch.randn(tokens + 1, heads, HEAD, HEAD, generator=random) * 0.1
    state = state.to(layer.get_state_dtype()[1])
    x, qkvz, conv_state, state = (one.to(device) for one in (x, qkvz, conv_state, state))
    for is_prompts in (False, True):
        lengths = LENGTHS if is_prompts else (1,) * tokens
        count = len(lengths)
        has_state = torch.ones(count, dtype=torch.bool, device=device)
        has_state[0] = not is_prompts
        sequences = Sequences(
            slots=torch.arange(1, count + 1, dtype=torch.int32, device=device),
            starts=torch.tensor([0, *lengths], device=device).cumsum(0).int(),
            has_state=has_state,
            live_tokens=tokens,
        )
        caches = (_as_vllm(conv_state.clone()), state.clone())
        out = x.new_full((tokens, heads, HEAD), float("nan"))
        if is_prompts:
            rule.prompts(x, qkvz, caches, sequences, out)
        else:
            rule.step(x, qkvz, caches, sequences.slots, out)
        expected = _expected(rule, x, qkvz, conv_state.clone(), state.clone(), sequences)
        yield compare("attention", KIND, name, out.flatten(1), {"plain": expected.flatten(1).cpu()})


def _as_vllm(conv_state: Tensor) -> Tensor:
    return conv_state if is_conv_state_dim_first() else conv_state.transpose(-1, -2).contiguous()


def _expected(
    rule: Rule, x: Tensor, qkvz: Tensor, conv_state: Tensor, state: Tensor, sequences: Sequences
) -> Tensor:
    """In torch's operators on the device: on a CPU thirty layers would take seconds."""
    out = torch.empty(len(x), len(rule.a_log), HEAD, device=x.device)
    reference.prompts(
        x,
        rule.gates,
        qkvz,
        rule.interleaved,
        rule.conv_weight,
        conv_state,
        state,
        sequences.slots,
        sequences.starts,
        sequences.has_state,
        sequences.live_tokens,
        rule.a_log,
        rule.dt_bias,
        rule.norm,
        rule.epsilon,
        rule.sigmoid,
        out,
    )
    return out
