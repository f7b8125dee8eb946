"""Linear attention with the gated delta rule (Qwen3-Next, Qwen3.5) in a few launches.

vLLM's layer launches a kernel each for the product of two gates, copies, a convolution, the rule
and a norm, and more of them for prompts. The replaced forward is in_proj_qkvz, one operator,
out_proj. In the operator a step of decoding alone is nibble::gated_delta_step, a step with prompts
of up to MOST_TOKENS tokens nibble::gated_delta_prompts, and every other step vLLM's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from nibble_kernels.gated_delta import (
    HEAD,
    MAX_SHARE,
    TAPS,
    gated_delta_prompts,
    gated_delta_step,
)
from torch import Tensor, nn
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as qwen
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from nibble.engine.plugin.cuda import runs_here
from nibble.engine.plugin.loaded_models import Unsuitable, after_loading, expect, split_graphs
from nibble.engine.plugin.options import current_options
from nibble.engine.plugin.require import required, required_of_instances

logger = init_logger(f"vllm.{__name__}")

Layer = qwen.QwenGatedDeltaNetAttention
# What splits vLLM's graphs, and so does this operator where vLLM's does.
OPERATOR, CORE = "nibble::gated_delta_of_layer", "vllm::qwen_gdn_attention_core"
ATTRIBUTE = "nibble_rule"  # of vLLM's layer
STATES = (torch.float32, torch.bfloat16)
# In a step with prompts. The kernel processes a sequence token by token, vLLM's 64 at once.
MOST_TOKENS = 2048

_library = torch.library.Library("nibble", "FRAGMENT")


class Sequences(NamedTuple):
    """Arguments of gated_delta_prompts that say which tokens are whose."""

    slots: Tensor
    starts: Tensor
    has_state: Tensor
    live_tokens: int


class Rule:
    """The kernels' constant arguments for a layer. It keeps no reference to the layer."""

    def __init__(self, layer: Any) -> None:
        self.gates = layer.in_proj_ba.weight.data
        self.interleaved = layer.gqa_interleaved_layout
        self.conv_weight = layer.conv1d.weight.data
        self.a_log, self.dt_bias, self.norm = _floats(layer)
        self.epsilon = layer.norm.eps
        self.sigmoid = layer.norm.activation == "sigmoid"

    def follow(self, layer: Any) -> None:
        """Take the layer's numbers again, in place, since CUDA graphs read them."""
        for own, new in zip((self.a_log, self.dt_bias, self.norm), _floats(layer), strict=True):
            own.copy_(new)

    def step(
        self, x: Tensor, qkvz: Tensor, caches: tuple[Tensor, ...], slots: Tensor, out: Tensor
    ) -> None:
        """One token each of the sequences in `slots`. caches: vLLM's, of the layer."""
        gated_delta_step(x, self.gates, qkvz, slots=slots, **self._constants(caches), out=out)

    def prompts(
        self,
        x: Tensor,
        qkvz: Tensor,
        caches: tuple[Tensor, ...],
        sequences: Sequences,
        out: Tensor,
    ) -> None:
        """Sequences of any number of tokens."""
        gated_delta_prompts(
            x,
            self.gates,
            qkvz,
            **sequences._asdict(),
            **self._constants(caches),
            out=out,
        )

    def _constants(self, caches: tuple[Tensor, ...]) -> dict[str, Any]:
        conv_state, state = caches[:2]
        if not is_conv_state_dim_first():
            conv_state = conv_state.transpose(-1, -2)
        return {
            "interleaved": self.interleaved,
            "conv_weight": self.conv_weight,
            "conv_state": conv_state,
            "state": state,
            "a_log": self.a_log,
            "dt_bias": self.dt_bias,
            "norm": self.norm,
            "epsilon": self.epsilon,
            "sigmoid": self.sigmoid,
        }


def _floats(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    return layer.A_log.data.float(), layer.dt_bias.data.float(), layer.norm.weight.data.float()


def decodes(metadata: Any) -> bool:
    """Whether each token of a step continues a sequence, as vLLM's layer decides it (vllm 0.32
    qwen_gdn_linear_attn.py:1372).
    """
    return (
        metadata.spec_sequence_masks is None
        and metadata.num_prefills == 0
        and metadata.num_decodes > 0
    )


def has_short_prompts(metadata: Any) -> bool:
    """Whether nibble's kernels take a step with prompts."""
    return (
        metadata.spec_sequence_masks is None
        and metadata.num_prefills > 0
        and metadata.num_actual_tokens <= MOST_TOKENS
        and metadata.checkpoint is None
    )


def rule_of(layer: Any) -> Rule | None:
    """The kernels' arguments for vLLM's layer, if they compute it."""
    return getattr(layer, ATTRIBUTE, None)


def _sequences(metadata: Any) -> Sequences:
    count = metadata.num_decodes + metadata.num_prefills  # without those that fill up a batch
    return Sequences(
        metadata.non_spec_state_indices_tensor[:count],
        metadata.non_spec_query_start_loc[: count + 1],
        metadata.has_initial_state[:count],
        metadata.num_actual_tokens,
    )


def _of_layer(x: Tensor, qkvz: Tensor, out: Tensor, layer_name: Any) -> None:
    name = _resolve_layer_name(layer_name)
    context = get_forward_context()
    layer: Any = context.no_compile_layers[name]
    all_metadata = context.attn_metadata
    metadata: Any = all_metadata.get(name) if isinstance(all_metadata, dict) else None
    if metadata is None:  # vLLM measures memory
        out.zero_()
        layer._warmup_prefill_kernels(qkvz, layer.value_dim // layer.tp_size)
    elif decodes(metadata):
        slots = metadata.non_spec_state_indices_tensor[: metadata.num_actual_tokens]
        layer.nibble_rule.step(x, qkvz, layer.kv_cache, slots, out)
    elif has_short_prompts(metadata):
        layer.nibble_rule.prompts(x, qkvz, layer.kv_cache, _sequences(metadata), out)
    else:
        _as_vllm(layer, x, qkvz, out)


def _as_vllm(layer: Any, x: Tensor, qkvz: Tensor, out: Tensor) -> None:
    """What vLLM's forward computes between the two products."""
    out.zero_()
    ba, _ = layer.in_proj_ba(x)
    qkv, z, b, a = layer.prepare_gdn_attention_core_inputs(qkvz, ba, len(x))
    layer._forward_core(qkv, b.contiguous(), a.contiguous(), out)
    layer._rms_norm_gated_cuda(out, z, out)


# The types themselves, which torch makes the operator's schema of.
_of_layer.__annotations__ = {
    **dict.fromkeys(("x", "qkvz", "out"), Tensor),
    "layer_name": LayerNameType,
    "return": None,
}
direct_register_custom_op(
    OPERATOR.rpartition(":")[2],
    _of_layer,
    mutates_args=["out"],
    fake_impl=lambda x, qkvz, out, layer_name: None,
    target_lib=_library,
)


class _WithRule:
    """The forward of a layer with a Rule."""

    in_proj_qkvz: Any
    out_proj: Any
    prefix: str
    value_dim: int
    tp_size: int

    def forward(self, hidden_states: Tensor) -> Tensor:
        qkvz, _ = self.in_proj_qkvz(hidden_states)
        heads = self.value_dim // self.tp_size // HEAD
        out = qkvz.new_empty((len(qkvz), heads, HEAD))
        torch.ops.nibble.gated_delta_of_layer(
            hidden_states, qkvz, out, _encode_layer_name(self.prefix)
        )
        output, _ = self.out_proj(out.flatten(-2))
        return output


# It keeps the name, which messages of vLLM have.
LayerWithRule = type(Layer.__name__, (_WithRule, Layer), {"__module__": __name__})


def follow_loading() -> None:
    """Use the kernel in every model that vLLM loads in this process with the option
    linear_attention.

    Raises VllmMismatch.
    """
    required(Layer, "forward", "self", "hidden_states")
    required(Layer, "_forward_core", "self", "mixed_qkv", "b", "a", "core_attn_out")
    required(Layer, "_rms_norm_gated_cuda", "self", "x", "output_gate", "out")
    required(Layer, "_warmup_prefill_kernels", "self", "qkv_or_qkvz", "v_dim")
    inputs = ("self", "mixed_qkvz", "mixed_ba", "num_tokens")
    required(Layer, "prepare_gdn_attention_core_inputs", *inputs)
    parts = ("in_proj_qkvz", "in_proj_ba", "conv1d", "norm", "out_proj", "A_log", "dt_bias")
    required_of_instances(Layer, *parts, "gqa_interleaved_layout", "disable_tp_for_ba_proj")
    required_of_instances(Layer, "num_k_heads", "num_v_heads", "value_dim", "tp_size", "prefix")
    fields = ("non_spec_state_indices_tensor", "non_spec_query_start_loc", "has_initial_state")
    required_of_instances(GDNAttentionMetadata, *fields, "checkpoint", "num_actual_tokens")

    def change(model: nn.Module) -> None:
        if current_options().linear_attention != "on":
            return
        is_here, why = runs_here()
        reasons = replace_layers(model, get_current_vllm_config()) if is_here else [str(why)]
        for reason in reasons:
            logger.info_once("vLLM computes linear attention: %s", reason)
        if count := sum(isinstance(module, _WithRule) for module in model.modules()):
            logger.info("nibble's gated delta rule: %d layers", count)

    after_loading(change)


def replace_layers(model: nn.Module, config: Any) -> list[str]:
    """Let the kernels compute each suitable layer of a loaded model.

    Returns why layers keep vLLM's code, each reason once.
    """
    reasons, replaced = dict[str, None](), False
    for layer in layers_of(model):
        if (rule := rule_of(layer)) is not None:  # its weights were loaded again
            rule.follow(layer)
            continue
        try:
            _check(layer, config)
        except Unsuitable as reason:
            reasons[str(reason)] = None
            continue
        setattr(layer, ATTRIBUTE, Rule(layer))
        layer.__class__ = LayerWithRule
        replaced = True
    if replaced:
        split_graphs(config.compilation_config, OPERATOR, beside=CORE)
    return list(reasons)


def layers_of(model: nn.Module) -> Iterator[Any]:
    """vLLM's layers with the gated delta rule."""
    for module in list(model.modules()):
        if isinstance(module, Layer):
            yield module


def _check(layer: Any, config: Any) -> None:
    """Raise Unsuitable if the kernel would compute something else than the layer."""
    expect(type(layer) is Layer, f"{type(layer).__name__} is not known")
    # Prompts take one kernel or another by the number of tokens in a step.
    expect(not envs.VLLM_BATCH_INVARIANT, "VLLM_BATCH_INVARIANT rules it out")
    expect(config.speculative_config is None, "drafts need its kernels")
    expect(config.lora_config is None, "adapters may change its products")
    dtype = config.model_config.dtype
    expect(dtype == torch.bfloat16, f"the model computes in {dtype}")
    expect(layer.enable_packed_recurrent_decode, "VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE is off")
    heads = (layer.head_k_dim, layer.head_v_dim)
    expect(heads == (HEAD, HEAD), f"its heads have {heads[0]} and {heads[1]} numbers")
    share = layer.num_v_heads // layer.num_k_heads
    expect(1 <= share <= MAX_SHARE, f"a key head has {share} value heads")
    expect(layer.conv_kernel_size == TAPS, f"it convolves {layer.conv_kernel_size} tokens")
    expect(layer.activation in ("silu", "swish"), f"it has {layer.activation}")
    expect(layer.conv1d.bias is None, "its convolution has a bias")
    conv_dtype, state_dtype = layer.get_state_dtype()
    expect(conv_dtype == torch.bfloat16, f"the convolution's state is {conv_dtype}")
    expect(state_dtype in STATES, f"its state is {state_dtype}")
    _check_gates(layer)
    _check_norm(layer.norm)
    names = ("in_proj_ba", "conv1d", "norm")
    parts = [getattr(layer, name) for name in names]
    expect(
        not any(part._forward_hooks or part._forward_pre_hooks for part in parts),
        "its parts have hooks",
    )


def _check_gates(layer: Any) -> None:
    gates = layer.in_proj_ba
    is_plain = isinstance(gates.quant_method, UnquantizedLinearMethod) and gates.bias is None
    expect(is_plain, "its gates are quantized or have a bias")
    shape = (2 * layer.num_v_heads // layer.tp_size, layer.hidden_size)
    expect(
        gates.weight.dtype == torch.bfloat16 and gates.weight.shape == shape,
        f"its gates are {gates.weight.dtype}, or packed",
    )
    expect(layer.hidden_size % 8 == 0, f"it has {layer.hidden_size} columns")


def _check_norm(norm: Any) -> None:
    is_plain = norm.norm_before_gate and norm.bias is None
    expect(is_plain, "its norm follows the gate, or has a bias")
    expect(norm.group_size in (None, HEAD), "its norm has groups")
    expect(norm.activation in ("silu", "swish", "sigmoid"), f"its gate is {norm.activation}")
