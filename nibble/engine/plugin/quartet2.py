"""--quantization quartet2: Quartet II's NVFP4 for weights at load and activations at each step.

On GPUs with an FP4 product, vLLM's CUTLASS kernel computes W4A4. On other devices the activations
are quantized and dequantized, and a weight-only NVFP4 kernel multiplies them. The product is the
same, because both operands are exact in BF16, except for the scale G.
"""

from __future__ import annotations

from typing import Any

import torch
from nibble_kernels.library import operator
from nibble_kernels.quartet2 import Mode, nvfp4_dequantize, quartet2_quant
from nibble_kernels.quartet2.quantize import quant_fp4
from nibble_kernels.scale_layout import BLOCK, tile, untile
from torch import Tensor
from torch.nn import Parameter
from vllm import _custom_ops
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    is_forward_context_available,
)
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, RowParallelLinear
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.quantization.utils.nvfp4_utils import cutlass_fp4_supported
from vllm.platforms import current_platform

from nibble.engine.contract import CLOVERLM_MODEL_TYPE, QUARTET2, QUARTET2_LINEAR, reported_as
from nibble.engine.plugin.cloverlm.projection import stored_part
from nibble.engine.plugin.kernels import is_marlin, nvfp4_linear_kernel
from nibble.engine.plugin.layers import (
    apply_column_scale,
    check_loaded,
    mark_unloaded,
    merge_layer,
    set_column_scale,
)
from nibble.engine.plugin.options import current_options, weights_are_real
from nibble.engine.plugin.require import required, required_of_instances

PACKED_LEAVES = ("weight", "weight_scale", "weight_scale_2")
LARGEST = 1536.0  # largest code * scale of every nonzero tensor: 6 * 256 or 4 * 384
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1


def register_quartet2() -> None:
    """Register --quantization quartet2 with vLLM. May be called again. Raises VllmMismatch."""
    names = ("a", "b", "block_scale_a", "block_scale_b", "alpha", "out_dtype")
    required(_custom_ops, "cutlass_scaled_fp4_mm", *names)
    required_of_instances(ForwardContext, "is_padding")
    register_quantization_config(QUARTET2)(Quartet2Config)


class Quartet2Config(QuantizationConfig):
    """Quantizes every linear layer of a block, but not the embedding and the head."""

    def get_name(self) -> Any:
        return QUARTET2

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75  # Marlin's minimum

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Quartet2Config:
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """quartet2 for CloverLM. Its hf_quant_config.json says NVFP4 without a method, and vLLM
        refuses every other --quantization.
        """
        return QUARTET2 if getattr(hf_config, "model_type", None) == CLOVERLM_MODEL_TYPE else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        return Quartet2LinearMethod() if isinstance(layer, LinearBase) else None


@reported_as(QUARTET2_LINEAR)
class Quartet2LinearMethod(LinearMethodBase):
    """The method of one linear layer, loaded from a BF16 or a packed checkpoint.

    Parameters of the layer: `weight` (codes, uint8 [N, K/2]), `weight_scale` (E4M3 [N, K/16]) and,
    until the weights are processed, `weight_scale_2` (float32, one per stored part).
    """

    def __init__(self) -> None:
        options = current_options()
        self.quantizes_activations = not options.weights_only
        self.mode: Mode = options.act_scale_mode
        self.has_fp4_product = self.quantizes_activations and _has_fp4_product()
        self.kernel = None if self.has_fp4_product else nvfp4_linear_kernel(use_a16=True)
        self.is_real = weights_are_real()

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        if columns % BLOCK:
            raise ValueError(
                f"{layer.prefix}: {columns} columns a rank are not a multiple of {BLOCK}"
            )
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition, layer.output_size_per_partition = columns, rows
        layer.params_dtype = params_dtype
        shapes = {
            "weight": ((rows, columns // 2), torch.uint8),
            "weight_scale": ((rows, columns // BLOCK), torch.float8_e4m3fn),
            "weight_scale_2": ((len(output_partition_sizes),), torch.float32),
        }
        for name, (shape, dtype) in shapes.items():
            layer.register_parameter(
                name, Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
            )
        mark_unloaded(layer, "weight_scale_2")

    def load(self, layer: Any, part: int, stored: str, tensors: dict[str, Tensor]) -> None:
        """Load this rank's share of the stored weight `stored`, and quantize it if it is BF16.

        part: index among the parts of a fused layer. Raises ValueError.
        """
        device = layer.weight.device
        codes, scales, g = operands(stored, tensors, *stored_part(layer, part), device)
        for name, values in (("weight", codes), ("weight_scale", scales)):
            target = getattr(layer, name).data.split(layer.logical_widths)[part]
            if target.shape != values.shape:
                raise ValueError(
                    f"{stored} has the wrong shape: {list(values.shape)}, expected"
                    f" {list(target.shape)}"
                )
            target.copy_(values)
        layer.weight_scale_2.data[part] = g

    def process_weights_after_loading(self, layer: Any) -> None:
        column_scale = None
        if self.is_real:
            check_loaded(layer, "weight_scale_2")
            marlin = self.kernel is not None and is_marlin(self.kernel)
            column_scale = merge_layer(layer, "weight_scale_2", marlin)
        layer.weight_global_scale = Parameter(
            layer.weight_scale_2.data[0].clone(), requires_grad=False
        )
        del layer.weight_scale_2
        if self.kernel is None:
            layer.weight_scale = Parameter(tile(layer.weight_scale.data), requires_grad=False)
        else:
            self.kernel.process_weights_after_loading(layer)
        set_column_scale(layer, column_scale)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self.quantizes_activations:
            assert self.kernel is not None
            return apply_column_scale(layer, self.kernel, self.kernel.apply_weights, x, bias)
        return apply_column_scale(layer, self.kernel, self._apply_quantized, x, bias)

    def _apply_quantized(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        amax = None if self.mode == "token" else _amax(layer, x)
        codes, scales, g = quartet2_quant(x, self.mode, amax, tiled=self.kernel is None)
        if self.kernel is None:
            y = self._fp4_product(layer, codes, scales, g, x.dtype)
            return y if bias is None else y + bias
        if self.mode != "batch":  # exact: G is a power of two
            return self.kernel.apply_weights(
                layer, nvfp4_dequantize(codes, scales, g, x.dtype), bias
            )
        # On the CPU the kernel returns float32 sums, so that the multiplication by G is exact.
        dtype = torch.float32 if current_platform.is_cpu() else x.dtype
        y = self.kernel.apply_weights(
            layer, nvfp4_dequantize(codes, scales, torch.ones_like(g), dtype), None
        )
        y = (y * g).to(x.dtype)
        return y if bias is None else y + bias

    def _fp4_product(
        self, layer: Any, codes: Tensor, scales: Tensor, g: Tensor, dtype: torch.dtype
    ) -> Tensor:
        alpha = layer.weight_global_scale if self.mode == "token" else layer.weight_global_scale * g
        y = _custom_ops.cutlass_scaled_fp4_mm(
            codes, layer.weight, scales, layer.weight_scale, alpha.reshape(1), dtype
        )
        return (y * g).to(dtype) if self.mode == "token" else y  # exact: a power of two


def is_packed(weight: Tensor) -> bool:
    """Whether a stored weight has two codes per byte. safetensors' F4 is float4_e2m1fn_x2."""
    return weight.dtype in (torch.uint8, torch.float4_e2m1fn_x2)


def operands(
    stored: str, tensors: dict[str, Tensor], rows: slice, columns: slice, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [N, K/2], row-major scales E4M3 [N, K/16] and G, float32 [], of some rows and
    columns of a BF16 or packed weight.

    stored: the weight's name; tensors: by PACKED_LEAVES. G is that of the whole tensor, so the
    result does not depend on the number of ranks. Raises ValueError for a packed weight whose
    scales are not in 128x4 tiles, and for values that are not finite.
    """
    weight = tensors["weight"].to(device)
    if not is_packed(weight):
        amax = weight.abs().amax().float()
        if not amax.isfinite():
            raise ValueError(f"{stored}.weight holds values that are not finite")
        return quant_fp4(weight[rows, columns].contiguous(), amax, four_over_six=True, tiled=False)
    codes = weight.view(torch.uint8)
    blocks = codes.shape[1] * 2 // BLOCK
    scales = tensors["weight_scale"].to(device)
    if scales.shape != (len(codes), blocks) or len(codes) % 128 or blocks % 4:
        raise ValueError(
            f"{stored}.weight_scale is {list(scales.shape)}: expected one scale for {BLOCK} columns"
            f" of [{len(codes)}, {codes.shape[1] * 2}], in 128x4 tiles"
        )
    scales = untile(scales, len(codes), blocks)
    check_tiles(stored, codes, scales)
    start, stop, _ = columns.indices(codes.shape[1] * 2)
    return (
        codes[rows, start // 2 : stop // 2],
        scales[rows, start // BLOCK : stop // BLOCK],
        tensors["weight_scale_2"].to(device).float().reshape(()),
    )


def check_tiles(stored: str, codes: Tensor, scales: Tensor) -> None:
    """Raise ValueError if scales belong to other blocks.

    With four-over-six, the largest code * scale of every nonzero tensor is 1536.
    """
    pairs = codes.unflatten(-1, (-1, BLOCK // 2))
    index = torch.maximum(pairs & 7, pairs >> 4 & 7).amax(-1).int()
    largest = float((torch.tensor(MAGNITUDES, device=codes.device)[index] * scales.float()).amax())
    if largest not in (0.0, LARGEST):
        raise ValueError(
            f"{stored}: its largest code times scale is {largest:g}, expected {LARGEST:g}: its"
            " scales are not in the 128x4 tiles of Quartet II, or the file is damaged (`nibble"
            " inspect` tells which)"
        )


def _has_fp4_product() -> bool:
    return current_platform.is_cuda() and cutlass_fp4_supported()


def _amax(layer: torch.nn.Module, x: Tensor) -> Tensor:
    """The largest magnitude of the batch without padding, over all ranks that have columns of it.

    float32 [].
    """
    amax = _batch_amax(x)
    if isinstance(layer, RowParallelLinear) and layer.tp_size > 1:
        amax = tensor_model_parallel_all_gather(amax.reshape(1)).amax()
    return amax


def _amax_of_rows(x: Tensor) -> Tensor:
    """The largest magnitude of x [rows, K] without padding rows, float32 [].

    Rows that pad a batch to the size of a CUDA graph have arbitrary contents (vllm 0.32
    forward_context.py:165).
    """
    rows = x.abs().amax(-1).float()
    padding = get_forward_context().is_padding if is_forward_context_available() else None
    if padding is not None:
        rows = torch.where(padding[: len(rows)], 0.0, rows)
    return rows.amax() if len(rows) else rows.new_zeros(())


_batch_amax = operator(
    "quartet2_batch_amax(Tensor x) -> Tensor",
    _amax_of_rows,
    lambda x: x.new_empty((), dtype=torch.float32),
)
