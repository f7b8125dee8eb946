"""CloverLM with vLLM 0.32's layers, from the authors' formula (IST-DASLab/CloverLM 806f175).

reference.py is the specification. Differences from other models: a norm after each sublayer in
place of one before, rotation before normalization, unit-length queries and keys with a learned
scale per head and without another softmax scale, squared ReLU, and a tied embedding.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.activation import ReLUSquaredActivation
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import SupportsPP
from vllm.model_executor.models.utils import PPMissingLayer, make_layers, maybe_prefix
from vllm.sequence import IntermediateTensors

from nibble.engine.contract import CLOVERLM_ARCHITECTURE, reported_as
from nibble.engine.plugin.cloverlm.arithmetic import RmsNorm, Rotary, to_sphere
from nibble.engine.plugin.cloverlm.config import CloverLMConfig
from nibble.engine.plugin.cloverlm.loading import load_model
from nibble.engine.plugin.cloverlm.projection import HeadProjection, heads_of_rank

# The scale of keys in an FP8 cache. Elements of a unit vector are at most 1, so codes are at most
# 256; E4M3 has 448.
KEY_SCALE = 2.0**-8


def config_of(vllm_config: VllmConfig) -> CloverLMConfig:
    """The model's configuration."""
    return cast(CloverLMConfig, vllm_config.model_config.hf_config)


def model_dtype(vllm_config: VllmConfig) -> torch.dtype:
    """The dtype of the model's products. vLLM resolves names such as "auto" before it builds a
    model.
    """
    return cast(torch.dtype, vllm_config.model_config.dtype)


class UnitKeyAttention(Attention):
    """vLLM's attention with an FP8 cache scale for keys of length 1; vLLM would use 1.0."""

    _k_scale: Tensor

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        if self.kv_cache_dtype.startswith("fp8"):
            self._k_scale.fill_(KEY_SCALE)
            self._k_scale_cpu = torch.tensor(KEY_SCALE)
            self._k_scale_float = KEY_SCALE


class CloverAttention(nn.Module):
    groups: Tensor

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = config_of(vllm_config)
        quant_config = vllm_config.quant_config
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        self.head_dim = config.head_dim
        self.heads = heads_of_rank(
            config.num_attention_heads, config.num_key_value_heads, rank, ranks
        )
        self.qkv = HeadProjection(
            config.hidden_size,
            self.head_dim,
            self.heads,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv",
        )
        self.lo = RowParallelLinear(
            config.num_attention_heads * self.head_dim,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            return_bias=False,
            prefix=f"{prefix}.lo",
        )
        self.scale = nn.Parameter(torch.ones(len(self.heads.queries), 1), requires_grad=False)
        self.rotary = Rotary(self.head_dim, config.rope_base, config.max_position_embeddings)
        self.attention = UnitKeyAttention(
            len(self.heads.queries),
            self.head_dim,
            scale=1.0,
            num_kv_heads=len(self.heads.groups),
            cache_config=vllm_config.cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attention",
        )
        self.register_buffer("groups", torch.tensor(self.heads.groups), persistent=False)

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self._project(x))
        q = to_sphere(self.rotary(positions, q.float())) * self.scale.float()
        k = to_sphere(self.rotary(positions, k.float()))
        if not self.heads.is_plain:
            k, v = k[:, self.groups], v[:, self.groups]
        y = self.attention(q.to(x.dtype).flatten(1), k.to(x.dtype).flatten(1), v.flatten(1))
        return self.lo(y)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).split(self.qkv.output_sizes, dim=-1)


class CloverMlp(nn.Module):
    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = config_of(vllm_config)
        common: dict[str, Any] = {
            "bias": False,
            "quant_config": vllm_config.quant_config,
            "return_bias": False,
        }
        self.l1 = ColumnParallelLinear(
            config.hidden_size, config.intermediate_size, prefix=f"{prefix}.l1", **common
        )
        self.l2 = RowParallelLinear(
            config.intermediate_size, config.hidden_size, prefix=f"{prefix}.l2", **common
        )
        self.activation = ReLUSquaredActivation()

    def forward(self, x: Tensor) -> Tensor:
        return self.l2(self.activation(self.l1(x)))


class CloverBlock(nn.Module):
    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = config_of(vllm_config)
        self.dtype = model_dtype(vllm_config)
        self.mhsa = CloverAttention(vllm_config, prefix=f"{prefix}.mhsa")
        self.mlp = CloverMlp(vllm_config, prefix=f"{prefix}.mlp")
        self.out_att_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.out_mlp_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, positions: Tensor, residual: Tensor) -> Tensor:
        """residual [tokens, hidden size] in the residual's dtype. Sublayers use the model's."""
        y = self.mhsa(positions, residual.to(self.dtype))
        residual = (residual + self.out_att_norm(y)).to(residual.dtype)
        y = self.mlp(residual.to(self.dtype))
        return (residual + self.out_mlp_norm(y)).to(residual.dtype)


# vLLM infers the dimensions from annotations, but they are strings in this file.
@support_torch_compile(
    dynamic_arg_dims={"input_ids": 0, "positions": 0, "intermediate_tensors": 0, "inputs_embeds": 0}
)
class CloverLMModel(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = config_of(vllm_config)
        self.dtype = model_dtype(vllm_config)
        self.residual_dtype = residual_dtype(config, self.dtype)
        group = get_pp_group()
        if group.is_first_rank or (config.tie_word_embeddings and group.is_last_rank):
            self.emb = VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "emb")
            )
        else:
            self.emb = PPMissingLayer()
        self.start, self.end, self.blocks = make_layers(
            config.num_hidden_layers,
            lambda prefix: CloverBlock(vllm_config, prefix=prefix),
            prefix=maybe_prefix(prefix, "blocks"),
        )
        self.out_norm = (
            RmsNorm(config.hidden_size, config.rms_norm_eps)
            if group.is_last_rank
            else PPMissingLayer()
        )

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        residual: Any
        if intermediate_tensors is not None:
            residual = intermediate_tensors["residual"]
        elif inputs_embeds is not None:
            residual = inputs_embeds.to(self.residual_dtype)
        else:
            residual = self.emb(input_ids).to(self.residual_dtype)
        for block in islice(self.blocks, self.start, self.end):
            residual = block(positions, residual)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"residual": residual})
        return self.out_norm(residual).to(self.dtype)


def residual_dtype(config: CloverLMConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the residual stream. Raises ValueError for another name than "float32"."""
    if config.residual_dtype not in (None, "float32"):
        raise ValueError(
            f"residual_dtype of config.json is {config.residual_dtype!r}: expected float32 or null"
        )
    return torch.float32 if config.residual_dtype else dtype


@reported_as(CLOVERLM_ARCHITECTURE)
class CloverLMForCausalLM(nn.Module, SupportsPP):
    """The model for vLLM. Parameters have the checkpoint's names, but q, k and v are fused
    (`qkv`).
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = config_of(vllm_config)
        self.config = config
        self.transformer = CloverLMModel(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "transformer")
        )
        if get_pp_group().is_last_rank:
            self.linear = ParallelLMHead(
                config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "linear")
            )
            if config.tie_word_embeddings:
                self.linear = self.linear.tie_weights(
                    cast(VocabParallelEmbedding, self.transformer.emb)
                )
            self.logits_processor = LogitsProcessor(config.vocab_size)
        else:
            self.linear = PPMissingLayer()

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        """The residual that the previous rank sends, in the residual's dtype instead of `dtype`."""
        shape = (batch_size, self.config.hidden_size)
        return IntermediateTensors(
            {"residual": torch.zeros(shape, dtype=self.transformer.residual_dtype, device=device)}
        )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.transformer.emb(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        return self.transformer(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.linear, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return load_model(self, weights)
