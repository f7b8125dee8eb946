"""The output head in NVFP4: loaded in every model where the checkpoint has it so, or quantized from
BF16 at load.

43 of vLLM 0.32's models make their head without the checkpoint's quantization config.
`register_oot` is vLLM's own way to put a subclass in the place of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from nibble_kernels.weight_quant import quantize
from torch import Tensor
from torch.nn import Parameter
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from nibble.engine.plugin.kernels import nvfp4_linear_kernel
from nibble.engine.plugin.options import current_options
from nibble.engine.plugin.require import required

logger = init_logger(f"vllm.{__name__}")  # vLLM shows messages of loggers below this name
DEFAULT_NAME = "lm_head"


def register_head() -> None:
    """Make vLLM build NvFp4LMHead wherever a model asks for ParallelLMHead."""
    required(ParallelLMHead, "__init__", "self", *_PARAMETERS)
    required(ParallelLMHead, "register_oot")(NvFp4LMHead, name="ParallelLMHead")


class NvFp4LMHead(ParallelLMHead):
    """ParallelLMHead that knows the checkpoint's quantization, whether the model class passes it
    on or not.
    """

    def __init__(self, *args, **kwargs) -> None:
        kwargs.update(zip(_PARAMETERS, args, strict=False))
        kwargs["prefix"] = kwargs.get("prefix") or DEFAULT_NAME
        quantize_it = current_options().quantize_lm_head == "nvfp4" and not _is_draft()
        given = kwargs.get("quant_config")
        if given is None or quantize_it:
            kwargs["quant_config"] = HeadConfig(given or _quantization_of_the_model(), quantize_it)
        super().__init__(**kwargs)
        # vLLM's loader takes the first config among a model's children for the model's (vllm 0.32
        # models/utils.py:464).
        self.quant_config = given


# Of ParallelLMHead.__init__ up to its keyword-only part (vllm 0.32
# vocab_parallel_embedding.py:596).
_PARAMETERS = (
    "num_embeddings",
    "embedding_dim",
    "bias",
    "params_dtype",
    "org_num_embeddings",
    "padding_size",
    "quant_config",
    "prefix",
)


def _quantization_of_the_model() -> QuantizationConfig | None:
    """The checkpoint's quantization where it is one of those that can hold NVFP4; its ignore
    list decides about the head.
    """
    config = get_current_vllm_config_or_none()
    found = config.quant_config if config is not None else None
    names = ("modelopt_fp4", "modelopt_mixed", "compressed-tensors")
    return found if found is not None and found.get_name() in names else None


def _is_draft() -> bool:
    """Whether the model being made only drafts: it may take the head of the model proper later,
    and have loaded none.
    """
    config = get_current_vllm_config_or_none()
    return (
        config is not None
        and config.model_config is not None
        and config.model_config.runner_type == "draft"
    )


class HeadConfig:
    """A quantization config for the head alone: the checkpoint's method where it quantizes it,
    else ours or vLLM's plain one.
    """

    online_quantization_config = None  # read by vLLM's resolve_quant_method

    def __init__(self, inner: QuantizationConfig | None, quantize_it: bool) -> None:
        self.inner = inner
        self.quantize_it = quantize_it

    def get_quant_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        method = self.inner.get_quant_method(layer, prefix) if self.inner is not None else None
        if method is None or isinstance(
            method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod
        ):
            return QuantizedAtLoad() if self.quantize_it else None
        return method


class QuantizedAtLoad(UnquantizedEmbeddingMethod):
    """A BF16 head that becomes NVFP4 once it is loaded: weights only, one global scale over all
    tensor-parallel ranks.
    """

    supports_pre_processed_weights = False

    def __init__(self) -> None:
        self.kernel = nvfp4_linear_kernel(use_a16=True)

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight.data
        amax = weight.abs().amax().float()
        if layer.tp_size > 1:
            torch.distributed.all_reduce(
                amax, torch.distributed.ReduceOp.MAX, group=get_tp_group().device_group
            )
        quantized = quantize(weight, amax)
        del layer.weight
        layer.logical_widths = [weight.shape[0]]
        names = ("weight", "weight_scale", "weight_global_scale")
        for name, tensor in zip(names, quantized, strict=True):
            layer.register_parameter(name, Parameter(tensor, requires_grad=False))
        self.kernel.process_weights_after_loading(layer)
        logger.info_once("lm_head quantized to NVFP4 at load, for %s", type(self.kernel).__name__)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.kernel.apply_weights(layer, x, bias)

    def tie_weights(self, layer: Any, embed_tokens: VocabParallelEmbedding) -> torch.nn.Module:
        raise ValueError(
            "quantize_lm_head: this model ties lm_head to its token embedding, which stays in BF16;"
            " serve it without NIBBLE_QUANTIZE_LM_HEAD"
        )
