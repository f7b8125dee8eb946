"""nibble::gated_delta_step and gated_delta_prompts: linear attention with the gated delta rule,
from the gates' product to the gated norm. A decode step is one launch, sequences of several tokens
are four.
"""

from __future__ import annotations

from torch import Tensor

from nibble_kernels.gated_delta import reference
from nibble_kernels.library import operator

__all__ = ["HEAD", "MAX_SHARE", "TAPS", "gated_delta_prompts", "gated_delta_step"]

HEAD, TAPS, MAX_SHARE = reference.HEAD, reference.TAPS, 8  # of step.cuh


def _fake(*arguments: object) -> None:
    return None


_step = operator(
    "gated_delta_step(Tensor x, Tensor gates, Tensor qkvz, bool interleaved, Tensor conv_weight,"
    " Tensor(a!) conv_state, Tensor(b!) state, Tensor slots, Tensor a_log, Tensor dt_bias,"
    " Tensor norm, float epsilon, bool sigmoid, Tensor(c!) out) -> ()",
    reference.step,
    _fake,
)


def gated_delta_step(
    x: Tensor,
    gates: Tensor,
    qkvz: Tensor,
    *,
    interleaved: bool,
    conv_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    epsilon: float,
    sigmoid: bool = False,
    out: Tensor,
) -> None:
    """One token each of separate sequences, with HK key heads and HV value heads of 128.

    x [T, H] is the input of the layer's products, gates [2 HV, H] the weight of b and a, and qkvz
    [T, 2 (HK + HV) 128] the product of queries, keys, values and output gates, all in bfloat16.
    `interleaved`: qkvz and gates have a key head's parts with those of its value heads, as in
    Qwen3-Next's checkpoints; else all queries, keys, values and gates, and all b and a, follow
    each other. HV is 1 to MAX_SHARE times HK.

    A convolution of TAPS tokens and silu precede the rule: conv_weight bfloat16 [channels, TAPS],
    or with a dimension of 1 between; conv_state bfloat16 [slots, channels, at least 3], in any
    strides, oldest token first. state [slots, HV, 128 values, 128 keys] is float32 or bfloat16.
    slots int32 [up to T] has each token's place in both; no other token has it. 0 and less, and
    none, make its output 0.

    a_log and dt_bias [HV] and norm [128] are float32. out [T, HV, 128] (or [T, HV 128]) gets the
    output's RMSNorm times `norm` and silu of its gate, or sigmoid, in bfloat16.

    The states are changed in place. b, a and the convolution are rounded to bfloat16, and so is the
    output before its norm.
    """
    _step(
        *(x, gates, qkvz, interleaved, conv_weight, conv_state, state, slots),
        *(a_log, dt_bias, norm, epsilon, sigmoid, out),
    )


_prompts = operator(
    "gated_delta_prompts(Tensor x, Tensor gates, Tensor qkvz, bool interleaved, Tensor conv_weight,"
    " Tensor(a!) conv_state, Tensor(b!) state, Tensor slots, Tensor starts, Tensor has_state,"
    " int live_tokens, Tensor a_log, Tensor dt_bias, Tensor norm, float epsilon, bool sigmoid,"
    " Tensor(c!) out) -> ()",
    reference.prompts,
    _fake,
)


def gated_delta_prompts(
    x: Tensor,
    gates: Tensor,
    qkvz: Tensor,
    *,
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
    sigmoid: bool = False,
    out: Tensor,
) -> None:
    """gated_delta_step for sequences of any number of tokens, one behind the other in x, qkvz and
    out; tokens from live_tokens on are none and get 0.

    starts int32 [S + 1] has the first token of each sequence and live_tokens at its end; slots
    int32 [S], in any stride, its place in both states. Sequences without has_state (bool [S]) begin
    with states of 0.

    A GPU goes through a sequence token by token, at about the same speed for any number of
    sequences that it has room for: for a few thousand tokens in all.
    """
    _prompts(
        *(x, gates, qkvz, interleaved, conv_weight, conv_state, state, slots, starts, has_state),
        *(live_tokens, a_log, dt_bias, norm, epsilon, sigmoid, out),
    )
