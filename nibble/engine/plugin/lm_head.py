"""The output head in NVFP4: loaded from the checkpoint in every model, or quantized from BF16.

43 of vLLM 0.32's models build their head without the checkpoint's quantization config. The plugin
replaces the class of the head through vLLM's `register_oot`.
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
    """Make vLLM build NvFp4LMHead in place of ParallelLMHead. Raises VllmMismatch."""
    required(ParallelLMHead, "__init__", "self", *_PARAMETERS)
    required(ParallelLMHead, "register_oot")(NvFp4LMHead, name="ParallelLMHead")


class NvFp4LMHead(ParallelLMHead):
    """ParallelLMHead with the checkpoint's quantization, even if the model does not pass it on."""

    def __init__(self, *args, **kwargs) -> None:
        kwargs.update(zip(_PARAMETERS, args, strict=False))
        kwargs["prefix"] = kwargs.get("prefix") or DEFAULT_NAME
        quantize_it = current_options().quantize_lm_head == "nvfp4" and not _is_draft()
        given = kwargs.get("quant_config")
        if given is None or quantize_it:
            kwargs["quant_config"] = HeadConfig(given or _quantization_of_the_model(), quantize_it)
        super().__init__(**kwargs)
        # vLLM's loader uses the first config among a model's children as the model's (vllm 0.32
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
    """The checkpoint's quantization, if it can include NVFP4. Its ignore list covers the head."""
    config = get_current_vllm_config_or_none()
    quantization = config.quant_config if config is not None else None
    names = ("modelopt_fp4", "modelopt_mixed", "compressed-tensors")
    is_nvfp4 = quantization is not None and quantization.get_name() in names
    return quantization if is_nvfp4 else None


def _is_draft() -> bool:
    """Whether vLLM is building a draft model. It may have no head and later take the target's."""
    config = get_current_vllm_config_or_none()
    return (
        config is not None
        and config.model_config is not None
        and config.model_config.runner_type == "draft"
    )


class HeadConfig:
    """A quantization config for the head.

    It returns the checkpoint's method if that quantizes the head, else QuantizedAtLoad if
    `quantize_it`, else None for vLLM's unquantized method.
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
    """Quantizes a BF16 head to NVFP4 after the load: weights only, with one global scale for all
    tensor-parallel ranks.
    """

    supports_pre_processed_weights = False
    MESSAGE = "lm_head quantized to NVFP4 at load, for %s"

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
        logger.info_once(self.MESSAGE, type(self.kernel).__name__)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.kernel.apply_weights(layer, x, bias)

    def tie_weights(self, layer: Any, embed_tokens: VocabParallelEmbedding) -> torch.nn.Module:
        raise ValueError(
            "quantize_lm_head: this model ties lm_head to its token embedding, which stays in BF16;"
            " serve it without NIBBLE_QUANTIZE_LM_HEAD"
        )
