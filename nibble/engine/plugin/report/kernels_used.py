"""Reads the kernels that a warm worker uses from vLLM's objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import nibble_kernels
import torch
from vllm.compilation.counter import compilation_counter
from vllm.distributed import get_pp_group
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from nibble.engine.contract import ATTENTION, FLASH_ATTENTION
from nibble.engine.contract.report import KernelsUsed
from nibble.engine.plugin.draft_head import QuantizedDraftHead
from nibble.engine.plugin.e4m3_linear import FewRows
from nibble.engine.plugin.experts import Experts
from nibble.engine.plugin.layers import kernel_of


def what_ran(worker: Any) -> KernelsUsed:
    """The worker's kernels and settings; see contract.report.KernelsUsed.

    The supervisor compares them with its plan, and the workers with each other. Workers with the
    same `stage` have the same layers.
    """
    runner, config = worker.model_runner, worker.vllm_config
    models = list(models_of(runner))
    layers = config.compilation_config.static_forward_context.values()
    attention = [layer for layer in layers if hasattr(layer, "get_attn_backend")]
    compilation = config.compilation_config
    return {
        "linear": _counted(_linear(module) for model in models for module in model.modules()),
        "moe": _counted(_moe(module) for model in models for module in model.modules()),
        "attention": _counted(attention_name(layer) for layer in attention),
        "kv_cache_dtype": sorted({_kv_dtype(layer) for layer in attention if _has_cache(layer)}),
        "model_dtype": _short(config.model_config.dtype),
        "stage": get_pp_group().rank_in_group,
        "architecture": config.model_config.architecture,
        "quantization": config.model_config.quantization,
        "max_model_len": config.model_config.max_model_len,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "block_size": config.cache_config.block_size,
        "cudagraph_mode": compilation.cudagraph_mode.name,
        "cudagraphs_captured": compilation_counter.num_cudagraph_captured,
        "compilation_mode": compilation.mode.name,
        "sampler": _sampler(runner),
        "operators": nibble_kernels.implementations(),
        "device": worker.device.type,
    }


def models_of(runner: Any) -> Iterator[torch.nn.Module]:
    """The model and, if there is one, the draft model (vllm 0.32: drafter in V1, speculator in
    V2).
    """
    yield runner.get_model()
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    model = getattr(drafter, "model", None)
    if isinstance(model, torch.nn.Module):
        yield model


def _linear(module: Any) -> str | None:
    """Such as "nvfp4: MarlinNvFp4LinearKernel" for a linear layer or head. None for unquantized
    layers and other modules.
    """
    if not isinstance(module, LinearBase | ParallelLMHead):
        return None
    kernel, method = kernel_of(module), module.quant_method
    of_fp8 = kernel or getattr(getattr(module, "scheme", None) or method, "fp8_linear", None)
    if isinstance(of_fp8, FewRows):  # vLLM's kernel multiplies more rows
        return f"other: {of_fp8.reported}"
    if kernel is None:
        name = type(getattr(module, "scheme", None) or method).__name__
        return None if name.startswith("Unquantized") else f"other: {name}"
    if isinstance(method, QuantizedDraftHead):  # with the plan's kernel or another
        scheme = "draft head"
    else:
        scheme = "nvfp4" if isinstance(kernel, NvFp4LinearKernel) else "other"
    return f"{scheme}: {type(kernel).__name__}"


def _moe(module: Any) -> str | None:
    """Such as "nvfp4: MARLIN MarlinExperts": the method's backend, if any, and the class that
    computes. None for other modules.
    """
    if not isinstance(module, RoutedExperts):
        return None
    method = module.quant_method
    backends = {
        name: value
        for name, value in vars(method).items()
        if name.endswith("_backend") and hasattr(value, "name")
    }
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None) or method
    scheme = "nvfp4" if "nvfp4_backend" in backends or isinstance(method, Experts) else "other"
    names = [value.name for value in backends.values()] + [type(experts).__name__]
    return f"{scheme}: {' '.join(names)}"


def attention_name(layer: Any) -> str:
    """The backend that computes a layer's decode steps."""
    name: str = layer.get_attn_backend().get_name()
    return FLASH_ATTENTION if name == ATTENTION and layer.impl.refusal else name


def _has_cache(layer: Any) -> bool:
    """Whether a layer has a KV cache, unlike state-space models and linear attention."""
    return hasattr(layer, "kv_cache_dtype") and isinstance(layer.kv_cache, torch.Tensor)


def _kv_dtype(layer: Any) -> str:
    """The format of the KV cache: vLLM's name for it, or else the dtype of the tensor."""
    name = layer.kv_cache_dtype
    return name if name not in ("auto", "float16", "bfloat16") else _short(layer.kv_cache.dtype)


def _sampler(runner: Any) -> str:
    """The implementation of top-k and top-p sampling: "flashinfer", "native", or the name of V1's
    method for the platform, such as "forward_cpu".
    """
    sampler = getattr(runner, "sampler", None)
    chosen = getattr(getattr(sampler, "topk_topp_sampler", None), "forward", None)
    if chosen is not None:
        known = {"forward_cuda": "flashinfer", "forward_native": "native"}
        return known.get(chosen.__name__, str(chosen.__name__))
    return "flashinfer" if getattr(sampler, "use_flashinfer", False) else "native"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _counted(names: Any) -> dict[str, int]:
    return dict(sorted(Counter(name for name in names if name is not None).items()))
