"""The drafter's output head in NVFP4: a copy of a BF16 one, which the target keeps.

A drafter reads its head once for each token that it drafts. vLLM 0.32 gives it the target's head
after the load if its files have none or the same one (v1/worker/gpu/spec_decode/eagle/utils.py:104,
v1/spec_decode/llm_base_proposer.py:1508). Drafts are proposals, which the target verifies: a head
with other roundings changes how many are accepted, never the distribution of the answers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.config import SpeculativeConfig, VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform

from nibble.engine.contract import Options
from nibble.engine.plugin.cuda import NibbleNvFp4LinearKernel
from nibble.engine.plugin.kernels import nvfp4_linear_kernel
from nibble.engine.plugin.lm_head import DEFAULT_NAME, QuantizedAtLoad
from nibble.engine.plugin.require import (
    names_of_vllm,
    replace,
    required,
    required_of_instances,
)

logger = init_logger(f"vllm.{__name__}")  # vLLM shows messages of loggers below this name
METHODS = ("eagle", "eagle3", "mtp")  # as vLLM names them once it has read the config
ROW_MULTIPLE, COLUMN_MULTIPLE = 8, 16  # of nibble's kernel, and of the format


def follow_workers() -> None:
    """Follow the drafter's load in each worker that is created from now on with the option.

    The drafters' classes are imported in the worker alone. Raises VllmMismatch.
    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    create = required(WorkerWrapperBase, "init_device", "self")
    required_of_instances(WorkerWrapperBase, "vllm_config")

    @functools.wraps(create)
    def create_and_follow(wrapper: Any) -> None:
        if _is_wanted(wrapper.vllm_config):
            follow_drafters()
        create(wrapper)

    replace(WorkerWrapperBase, "init_device", create_and_follow)


@functools.cache
def follow_drafters() -> None:
    """Quantize the head of each drafter that is loaded in this process, by V1's model runner or
    V2's. Raises VllmMismatch.
    """
    with names_of_vllm():
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
        from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
    for drafter in (SpecDecodeBaseProposer, DraftModelSpeculator):
        load = required(drafter, "load_model", "self", "target_model")
        required_of_instances(drafter, "model", "vllm_config", "speculative_config")
        replace(drafter, "load_model", _and_quantize(load))
    required_of_instances(LogitsProcessor, "head_dtype")
    required(SpeculativeConfig, "use_gemma4_mtp", "self")


def _and_quantize(load: Any) -> Any:
    @functools.wraps(load)
    def load_and_quantize(drafter: Any, target_model: nn.Module) -> None:
        load(drafter, target_model)
        if _is_wanted(drafter.vllm_config) and _has_head(drafter.speculative_config):
            with set_current_vllm_config(drafter.vllm_config):
                quantize_heads(drafter.model)

    return load_and_quantize


def _is_wanted(config: VllmConfig) -> bool:
    return Options.from_config(config.additional_config).draft_head == "nvfp4"


def _has_head(speculation: SpeculativeConfig) -> bool:
    """Gemma 4's drafter reads rows of its head by cluster (vllm 0.32 gemma4_mtp.py:116)."""
    return speculation.method in METHODS and not speculation.use_gemma4_mtp()


def quantize_heads(model: nn.Module) -> None:
    """Replace the drafter's BF16 heads by NVFP4 copies, one for modules that share a head."""
    dtypes = {each.head_dtype for each in model.modules() if isinstance(each, LogitsProcessor)}
    copies: dict[nn.Module, nn.Module] = {}
    for owner, name, head in list(_heads(model)):
        if why := _obstacle(head, dtypes):
            logger.info_once("The drafter's head stays as it is: %s", why)
            continue
        if head not in copies:
            copies[head] = quantized_copy(head)
        setattr(owner, name, copies[head])


def _heads(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Each module with a head, the head's name in it, and the head. A head may be the embedding."""
    for owner in model.modules():
        for name, child in owner.named_children():
            is_tied = name == DEFAULT_NAME and isinstance(child, VocabParallelEmbedding)
            if is_tied or isinstance(child, ParallelLMHead):
                yield owner, name, child


def _obstacle(head: Any, dtypes: set[torch.dtype | None]) -> str:
    """Why a head is not quantized; empty if nothing prevents it."""
    method = type(head.quant_method)
    if method not in (UnquantizedEmbeddingMethod, UnquantizedLinearMethod):
        return f"it is quantized already ({method.__name__})"
    weight = head.weight
    if weight.dtype != torch.bfloat16:
        return f"it is in {weight.dtype}; expected torch.bfloat16"
    if others := dtypes - {None, weight.dtype}:
        return f"its logits are in {others.pop()}"
    rows, columns = weight.shape
    if rows % ROW_MULTIPLE or columns % COLUMN_MULTIPLE:
        multiples = f"multiples of {ROW_MULTIPLE} and {COLUMN_MULTIPLE}"
        return f"it has {rows} rows and {columns} columns; expected {multiples}"
    return ""


def quantized_copy(head: Any) -> Any:
    """A head with the same sharding, and the weight in NVFP4. `head` keeps its own."""
    copied = copy.copy(head)
    # A shallow copy has the same dictionaries of parameters, buffers and modules.
    for store in ("_parameters", "_buffers", "_modules"):
        setattr(copied, store, dict(getattr(head, store)))
    copied.quant_method = QuantizedDraftHead()
    copied.quant_method.process_weights_after_loading(copied)
    return copied


class QuantizedDraftHead(QuantizedAtLoad):
    """QuantizedAtLoad, for a drafter."""

    MESSAGE = "The drafter's head is an NVFP4 copy, for %s"

    def __init__(self) -> None:
        self.kernel = _kernel()


def _kernel() -> NvFp4LinearKernel:
    """nibble's on SM90, also for a target without NVFP4 layers; else that of weight-only layers."""
    backend = linear._get_linear_backend(quantization="nvfp4_w4a16")
    is_sm90 = current_platform.is_cuda() and current_platform.get_device_capability() == (9, 0)
    if backend == "auto" and is_sm90 and NibbleNvFp4LinearKernel.is_supported()[0]:
        return NibbleNvFp4LinearKernel(NvFp4LinearLayerConfig())
    return nvfp4_linear_kernel(use_a16=True)
