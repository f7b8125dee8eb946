"""The definition of nibble::gated_delta_step and gated_delta_prompts, in torch's float32 (Gated
Delta Networks, Yang et al. 2024, as Qwen3-Next and Qwen3.5 have it).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD, TAPS = 128, 4


def parts_of(qkvz: Tensor, key_heads: int, value_heads: int, interleaved: bool) -> list[Tensor]:
    """Queries and keys [T, key heads, 128], values and gates [T, value heads, 128] of rows.

    Interleaved rows have a key head's query, key, values and gates, then the next key head's.
    """
    tokens, share = len(qkvz), value_heads // key_heads
    if not interleaved:
        sizes = [HEAD * count for count in (key_heads, key_heads, value_heads, value_heads)]
        return [part.reshape(tokens, -1, HEAD) for part in qkvz.split(sizes, dim=-1)]
    groups = qkvz.view(tokens, key_heads, (2 + 2 * share) * HEAD)
    sizes = [HEAD, HEAD, share * HEAD, share * HEAD]
    return [part.reshape(tokens, -1, HEAD) for part in groups.split(sizes, dim=-1)]


def gates_of(x: Tensor, gates: Tensor, key_heads: int, interleaved: bool) -> list[Tensor]:
    """b and a [T, value heads], rounded to bfloat16 as a linear layer rounds them."""
    found = (x.float() @ gates.float().T).bfloat16().float()
    if not interleaved:
        return list(found.chunk(2, dim=-1))
    groups = found.view(len(x), key_heads, -1)
    return [part.reshape(len(x), -1) for part in groups.chunk(2, dim=-1)]


class Layer(NamedTuple):
    """What is the same for all tokens."""

    gates: Tensor
    interleaved: bool
    conv_weight: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    epsilon: float
    sigmoid: bool

    @property
    def value_heads(self) -> int:
        return len(self.gates) // 2

    @property
    def key_heads(self) -> int:
        return (self.conv_weight.numel() // TAPS // HEAD - self.value_heads) // 2


class Token(NamedTuple):
    """Of one token: channels of the convolution, and z, b and a of the value heads."""

    row: Tensor
    z: Tensor
    b: Tensor
    a: Tensor


def tokens_of(layer: Layer, x: Tensor, qkvz: Tensor) -> list[Token]:
    *qkv, z = parts_of(qkvz, layer.key_heads, layer.value_heads, layer.interleaved)
    b, a = gates_of(x, layer.gates, layer.key_heads, layer.interleaved)
    rows = torch.cat([part.flatten(1) for part in qkv], dim=-1)
    return [Token(*one) for one in zip(rows, z, b, a, strict=True)]


def advance(layer: Layer, token: Token, conv_state: Tensor, state: Tensor) -> Tensor:
    """The output [HV, 128]. Changes a sequence's conv_state [channels, at least 3] and state
    [HV, 128, 128], which is float32.
    """
    window = torch.cat([conv_state[:, : TAPS - 1], token.row[:, None]], dim=-1)
    conv_state[:, : TAPS - 1] = window[:, 1:]
    sums = (window.float() * layer.conv_weight.view(-1, TAPS).float()).sum(-1)
    heads = F.silu(sums).bfloat16().float().view(-1, HEAD)
    q, k, v = heads.split([layer.key_heads, layer.key_heads, layer.value_heads])
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    share = layer.value_heads // layer.key_heads
    q, k = (part.repeat_interleave(share, 0) for part in (q * HEAD**-0.5, k))
    state *= torch.exp(-torch.exp(layer.a_log) * F.softplus(token.a + layer.dt_bias))[:, None, None]
    change = torch.sigmoid(token.b)[:, None] * (v - (state @ k[:, :, None]).squeeze(-1))
    state += change[:, :, None] * k[:, None, :]
    y = (state @ q[:, :, None]).squeeze(-1).bfloat16().float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + layer.epsilon) * layer.norm
    z = token.z.float()
    return y * (torch.sigmoid(z) if layer.sigmoid else F.silu(z))


def step(
    x: Tensor,
    gates: Tensor,
    qkvz: Tensor,
    interleaved: bool,
    conv_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor,
    *rest: Any,
    **more: Any,
) -> None:
    """As nibble_kernels.gated_delta.gated_delta_step: each token is a sequence."""
    starts = torch.arange(len(slots) + 1)
    each = (slots, starts, slots > 0, len(slots))
    prompts(x, gates, qkvz, interleaved, conv_weight, conv_state, state, *each, *rest, **more)


def prompts(
    x: Tensor,
    gates: Tensor,
    qkvz: Tensor,
    interleaved: bool,
    conv_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor,
    starts: Tensor,
    has_state: Tensor,
    live_tokens: int,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    epsilon: float,
    sigmoid: bool,
    out: Tensor,
) -> None:
    """As nibble_kernels.gated_delta.gated_delta_prompts, one token after the other. Between the
    tokens of a call the state is float32.
    """
    layer = Layer(gates, interleaved, conv_weight, a_log, dt_bias, norm, epsilon, sigmoid)
    tokens, firsts = tokens_of(layer, x, qkvz), starts.tolist()
    result = out.view(len(x), layer.value_heads, HEAD)
    result.zero_()
    for sequence, slot in enumerate(slots.tolist()):
        if slot <= 0:
            continue
        if not has_state[sequence]:
            conv_state[slot], state[slot] = 0, 0
        exact = state[slot].float()
        for token in range(firsts[sequence], firsts[sequence + 1]):
            result[token] = advance(layer, tokens[token], conv_state[slot], exact).to(out.dtype)
        state[slot] = exact.to(state.dtype)
