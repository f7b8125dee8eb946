"""FP8 linear layers: nibble's GPU kernel for few rows, beside the kernel that vLLM chose.

vLLM rounds activations to E4M3. nibble's kernel leaves them in BF16, which is closer to the
unquantized model, and reads the weight where vLLM's kernel has it: there is only one copy. One
operator chooses between the two when it runs, so that a compiled graph serves any number of rows.
"""

from __future__ import annotations

import functools
import hashlib
from types import SimpleNamespace
from typing import Any

import torch
from nibble_kernels.e4m3_linear import E4m3Scales, e4m3_decode_linear, prepare_e4m3_scales
from nibble_kernels.library import operator
from torch import Tensor
from torch.nn import Parameter
from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import scaled_mm
from vllm.model_executor.kernels.linear.scaled_mm import cutlass, deep_gemm, flashinfer, pytorch
from vllm.model_executor.kernels.linear.scaled_mm import triton as vllm_triton
from vllm.model_executor.layers.quantization import fp8, modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w8a8_fp8 as vllm_compressed,
)
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

from nibble.engine.contract import GPU_E4M3_LINEAR
from nibble.engine.plugin import cuda
from nibble.engine.plugin.layers import name_of
from nibble.engine.plugin.options import current_options
from nibble.engine.plugin.require import replace, required, required_of_instances

logger = init_logger(f"vllm.{__name__}")  # vLLM shows messages of loggers below this name

# Of x, for nibble's kernel; more are multiplied by vLLM's. As for NVFP4 weights on SM90: no time
# of E4M3 weights is measured.
MAX_ROWS = 16
TILES, COLUMNS = "e4m3_tile_scale", "e4m3_column_scale"  # a layer's scales for nibble's kernel
# vLLM's kernels that keep the weight's bytes in rows: as a transposed view [K, N], or as [N, K].
TRANSPOSED = (
    cutlass.CutlassFP8ScaledMMLinearKernel,
    flashinfer.FlashInferFP8ScaledMMLinearKernel,
    pytorch.PerTensorTorchFP8ScaledMMLinearKernel,
    pytorch.ChannelWiseTorchFP8ScaledMMLinearKernel,
    vllm_triton.TritonFP8ScaledMMLinearKernel,
)
IN_ROWS = (
    cutlass.CutlassFp8BlockScaledMMKernel,
    deep_gemm.DeepGemmFp8BlockScaledMMKernel,
    flashinfer.FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
    pytorch.BlockWiseTorchFP8ScaledMMLinearKernel,
    vllm_triton.TritonFp8BlockScaledMMKernel,
)

# vLLM's kernels by the names that the operator gets. They hold no weight: layers of one shape and
# format share one, and have equal graphs.
_kernels: dict[str, Any] = {}


def follow_kernels() -> None:
    """Let FP8 layers of ModelOpt, compressed-tensors and FP8 checkpoints have nibble's kernel.
    Raises VllmMismatch.
    """
    for owner in (scaled_mm.FP8ScaledMMLinearKernel, scaled_mm.Fp8BlockScaledMMLinearKernel):
        required(owner, "process_weights_after_loading", "self", "layer")
        required(owner, "apply_weights", "self", "layer", "x", "bias")
        required_of_instances(owner, "config", "quant_fp8")
    required(scaled_mm.ScaledMMLinearKernel, "input_quant_key", "self")
    required(QuantFP8, "forward_cuda")
    required_of_instances(QuantFP8, "_forward_method")
    required(linear, "_get_linear_backend", "quantization")
    arguments = ("activation_quant_key", "weight_quant_key", "input_dtype", "out_dtype")
    for module in (modelopt, fp8, vllm_compressed):
        replace(module, "init_fp8_linear_kernel", fp8_linear_kernel, *arguments, "weight_shape")


def fp8_linear_kernel(*args: Any, **kwargs: Any) -> Any:
    """Replaces vLLM's init_fp8_linear_kernel: its choice, with nibble's kernel for few rows where
    the plan takes that. Raises ValueError if nibble's kernel cannot run.
    """
    kernel = linear.init_fp8_linear_kernel(*args, **kwargs)
    if current_options().e4m3_linear != "nibble":
        return kernel
    supported, reason = cuda.runs_here()
    if not supported:
        raise ValueError(f"nibble's E4M3 kernel cannot run: {reason}")
    if obstacle := _obstacle(kernel):
        logger.info_once("%s multiplies FP8 layers alone: %s", type(kernel).__name__, obstacle)
        return kernel
    chosen = _with_few_rows(type(kernel))
    ours = chosen.__new__(chosen)
    vars(ours).update(vars(kernel))
    return ours


def _obstacle(kernel: Any) -> str:
    """Why vLLM's kernel is alone; empty if nothing prevents nibble's beside it."""
    if type(kernel) not in TRANSPOSED + IN_ROWS:
        return "it rearranges the weight"
    for quantization in ("fp8_w8a8", "fp8_block_w8a8"):
        if (backend := linear._get_linear_backend(quantization=quantization)) != "auto":
            return f"--linear-backend {backend} names it"
    if envs.VLLM_BATCH_INVARIANT:
        return "nibble's order of additions depends on the number of rows"
    config = kernel.config
    if {config.input_dtype, config.out_dtype} != {torch.bfloat16}:
        return "nibble's kernel needs BF16 activations"
    return ""


class FewRows:
    """What nibble adds to a kernel of vLLM's; it comes before `theirs` in a class of both."""

    theirs: type
    config: Any
    quant_fp8: Any
    name = ""  # for the operator, once a layer is prepared

    @property
    def reported(self) -> str:
        """The classes that compute: nibble's, where it does, and vLLM's."""
        theirs = self.theirs.__name__
        return f"{type(self).__name__} {theirs}" if self.name else theirs

    def input_quant_key(self) -> None:
        """None: layers before this one would round its input to E4M3."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """vLLM's preparation, then nibble's scales. A layer that nibble's kernel does not multiply
        stays with vLLM's.
        """
        super().process_weights_after_loading(layer)  # type: ignore[misc]
        try:
            scales = self._scales(layer)
        except ValueError as error:
            logger.warning("%s has vLLM's kernel alone: %s", name_of(layer), error)
            return
        setattr(layer, TILES, Parameter(scales.tiles, requires_grad=False))
        if scales.columns is not None:
            setattr(layer, COLUMNS, Parameter(scales.columns, requires_grad=False))
        if layer.weight.is_cuda:
            # In a compiled graph torch's operations would be fused; within an operator they are
            # not, and vLLM's kernel is faster.
            self.quant_fp8._forward_method = self.quant_fp8.forward_cuda
        self.name = _register(self)

    def _scales(self, layer: Any) -> E4m3Scales:
        if getattr(layer, "is_bmm", False):
            raise ValueError("it is multiplied in batches")
        is_in_rows, scale = self.theirs in IN_ROWS, getattr(layer, _scale_name(layer))
        weight = layer.weight.data if is_in_rows else layer.weight.data.t()
        if tuple(weight.shape) != tuple(self.config.weight_shape):
            raise ValueError(f"{self.theirs.__name__} pads the weight")
        if scale.dtype != torch.float32:
            raise ValueError(f"its scales are {scale.dtype}")
        group = self.config.weight_quant_key.scale.group_shape
        return prepare_e4m3_scales(
            weight, scale.data, block=(group.row, group.col) if is_in_rows else None
        )

    def apply_weights(
        self, layer: Any, x: Tensor, bias: Tensor | None = None, **rest: Any
    ) -> Tensor:
        """x times the weight; see `_multiply`."""
        tiles = getattr(layer, TILES, None)
        if tiles is None:  # loaded in vLLM's own layout
            return super().apply_weights(layer, x, bias, **rest)  # type: ignore[misc]
        return _operator(
            x,
            layer.weight,
            tiles,
            getattr(layer, COLUMNS, None),
            getattr(layer, _scale_name(layer)),
            getattr(layer, "input_scale", None),
            bias,
            self.config.weight_shape[0],
            self.name,
        )


def _scale_name(layer: Any) -> str:
    return "weight_scale_inv" if hasattr(layer, "weight_scale_inv") else "weight_scale"


@functools.cache
def _with_few_rows(theirs: Any) -> Any:
    """The class of a kernel of vLLM's with nibble's beside it. It stays a subclass of vLLM's, which
    looks at classes.
    """
    return type(theirs)(GPU_E4M3_LINEAR, (FewRows, theirs), {"theirs": theirs})


def _register(kernel: Any) -> str:
    """The name of a kernel for the operator; equal ones have the same in every process."""
    described = f"{kernel.theirs.__qualname__} {kernel.config}"
    name = f"{kernel.theirs.__name__} {hashlib.sha256(described.encode()).hexdigest()[:8]}"
    _kernels.setdefault(name, kernel)
    return name


def _multiply(
    x: Tensor,
    weight: Tensor,
    tiles: Tensor,
    columns: Tensor | None,
    weight_scale: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    rows: int,
    kernel: str,
) -> Tensor:
    """By nibble's kernel up to MAX_ROWS rows of x, else by vLLM's. `rows`: of the weight."""
    found = _kernels[kernel]
    if x.numel() <= MAX_ROWS * x.shape[-1] and x.dtype == torch.bfloat16:
        in_rows = weight if found.theirs in IN_ROWS else weight.t()
        return e4m3_decode_linear(x, in_rows, E4m3Scales(tiles, columns), bias=bias)
    layer = SimpleNamespace(weight=weight, weight_scale=weight_scale, input_scale=input_scale)
    return found.theirs.apply_weights(found, layer, x, bias)


_operator = operator(
    "e4m3_linear(Tensor x, Tensor weight, Tensor tiles, Tensor? columns, Tensor weight_scale,"
    " Tensor? input_scale, Tensor? bias, int rows, str kernel) -> Tensor",
    _multiply,
    lambda x, weight, tiles, columns, weight_scale, input_scale, bias, rows, kernel: x.new_empty(
        (*x.shape[:-1], rows)
    ),
)
