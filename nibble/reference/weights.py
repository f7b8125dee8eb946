"""Reads a checkpoint's tensors and dequantizes NVFP4 and FP8, one tensor or some rows at a time.

Runs in the child process that computes a reference. nibble's main process does not import torch.
"""

from __future__ import annotations

import torch
from nibble_kernels.weight_quant import Nvfp4Weight as Packed
from nibble_kernels.weight_quant import dequantize
from torch import Tensor

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.nvfp4 import Nvfp4Weight
from nibble.checkpoint.scale_values import TensorFiles

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
SCALES = (
    ".weight_scale",
    ".weight_scale_2",
    ".input_scale",
    ".weight_scale_inv",
    ".weight_global_scale",
    ".input_global_scale",
    ".k_scale",
    ".v_scale",
    ".output_scale",
    ".weight_shape",
    ".weight_zero_point",
)
STACKED_SCALES = ("_weight_scale", "_weight_scale_2", "_input_scale")
# INPUT is an attribute of a weight: how its input is rounded, as (kind, scale); kinds are "fp4",
# "fp8" and BY_TOKEN. BY_TOKEN marks FP8 weights without an input scale in the checkpoint. A server
# may leave the inputs of any FP8 weight in BF16, or round them with a scale per token; the
# difference counts as the layer's noise (streaming.InBf16).
INPUT, BY_TOKEN = "nibble_input", "fp8 by token"
FP8_BLOCK = 128  # rows and columns that share a scale, unless the number of scales says otherwise


class Unsupported(Exception):
    """The reason why a checkpoint cannot have a computed reference, in one line."""


class Weights:
    """Tensors of a checkpoint on disk, by their names in the unquantized model. A context manager.

    dtype, device: of loaded tensors; rounds_inputs: NVFP4 weights get the attribute INPUT, for FP4
    activations. Raises Unsupported.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, rounds_inputs: bool
    ) -> None:
        if checkpoint.path is None or not checkpoint.tensors:
            raise Unsupported("the checkpoint has no safetensors files on disk")
        if checkpoint.scheme.vllm_quantization == "quartet2":
            raise Unsupported("Quartet II has no definition in transformers")
        self._tensors, self._files = checkpoint.tensors, TensorFiles(checkpoint.path)
        self._dtype, self._device, self._rounds_inputs = dtype, device, rounds_inputs
        self._nvfp4: dict[str, Nvfp4Weight] = {}
        for weight in checkpoint.nvfp4:
            self._nvfp4[weight.module + ("" if weight.experts else ".weight")] = weight
        self.names = tuple(
            sorted({self._plain_name(name) for name in self._tensors if not self._is_scale(name)})
        )

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the unquantized tensor; stacked experts are [experts, K, N]."""
        if (weight := self._nvfp4.get(name)) is None:
            return self._tensors[name].shape
        if weight.experts:
            return weight.experts, weight.columns, weight.rows
        return weight.rows, weight.columns

    def load(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """The dequantized tensor, or its rows (or experts) [start, stop), in `dtype`.

        Integers keep their type. Raises Unsupported for a format that nibble cannot read.
        """
        if (weight := self._nvfp4.get(name)) is not None:
            load = self._load_stacked if weight.experts else self._load_nvfp4
            return load(weight, start, stop)
        value = self._read(self._tensors[name], start, stop)
        if not value.is_floating_point():
            return value.to(self._device)
        if value.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            return self._load_fp8(name, value, start)
        return value.to(self._device, self._dtype)

    @staticmethod
    def _is_scale(name: str) -> bool:
        return name.endswith(SCALES) or (".experts." in name and name.endswith(STACKED_SCALES))

    @staticmethod
    def _plain_name(name: str) -> str:
        return name.removesuffix("_packed") if name.endswith(".weight_packed") else name

    def _read(self, info: TensorInfo, start: int = 0, stop: int | None = None) -> Tensor:
        if info.dtype not in DTYPES:
            raise Unsupported(f"{info.name} is {info.dtype}, which nibble cannot read")
        if not info.shape:
            data, shape = self._files.read(info, 0, info.nbytes), ()
        else:
            end = info.shape[0] if stop is None else min(stop, info.shape[0])
            row = info.nbytes // max(1, info.shape[0])
            data = self._files.read(info, start * row, end * row)
            shape = (end - start, *info.shape[1:])
        if not data:
            return torch.empty(shape, dtype=DTYPES[info.dtype])
        return torch.frombuffer(bytearray(data), dtype=DTYPES[info.dtype]).reshape(shape)

    def _load_nvfp4(self, weight: Nvfp4Weight, start: int, stop: int | None) -> Tensor:
        assert weight.scale is not None and weight.global_scale is not None
        codes = self._read(weight.weight, start, stop).view(torch.uint8)
        scales = self._read(weight.scale, start, stop)
        value = dequantize(Packed(codes, scales, self._multiplier(weight, weight.global_scale)))
        return self._with_input(value, weight, 0)

    def _load_stacked(self, weight: Nvfp4Weight, start: int, stop: int | None) -> Tensor:
        """Experts [start, stop) as [experts, K, N], the layout of the file."""
        assert weight.scale is not None and weight.global_scale is not None
        end = weight.experts if stop is None else stop
        experts = []
        for expert in range(start, end):
            packed = self._read(weight.weight, expert, expert + 1)[0]
            codes = packed.view(torch.uint8).T.contiguous()
            scales = self._read(weight.scale, expert, expert + 1)[0].T.contiguous()
            scale = self._multiplier(weight, weight.global_scale).flatten()
            experts.append(dequantize(Packed(codes, scales, scale[min(expert, len(scale) - 1)])).T)
        return self._with_input(torch.stack(experts), weight, start)

    def _multiplier(self, weight: Nvfp4Weight, info: TensorInfo) -> Tensor:
        """A global scale as a factor: compressed-tensors stores its inverse."""
        value = self._read(info).float()
        return 1 / value if weight.layout == "compressed-tensors" else value

    def _with_input(self, value: Tensor, weight: Nvfp4Weight, expert: int) -> Tensor:
        value = value.to(self._device, self._dtype)
        if self._rounds_inputs and weight.input_scale is not None:
            scale = self._multiplier(weight, weight.input_scale).flatten()
            setattr(value, INPUT, ("fp4", float(scale[min(expert, len(scale) - 1)])))
        return value

    def _load_fp8(self, name: str, value: Tensor, start: int) -> Tensor:
        """Rows of an FP8 weight, from row `start`, multiplied with their scales."""
        module = name.removesuffix(".weight")
        names = (f"{module}.weight_scale", f"{module}.weight_scale_inv")
        info = next((self._tensors[each] for each in names if each in self._tensors), None)
        if info is None:
            raise Unsupported(f"{name} is {value.dtype} without a scale")
        scale = self._fp8_scale(info, self._tensors[name].shape, start, value)
        result = (value.float() * scale).to(self._device, self._dtype)
        input_scale = self._tensors.get(f"{module}.input_scale")
        if input_scale is not None and input_scale.elements == 1:
            setattr(result, INPUT, ("fp8", float(self._read(input_scale).float().reshape(()))))
        else:
            setattr(result, INPUT, (BY_TOKEN, 0.0))
        return result

    def _fp8_scale(
        self, info: TensorInfo, whole: tuple[int, ...], start: int, value: Tensor
    ) -> Tensor:
        """The scales of `value`, which is the rows from `start` of a weight of shape `whole`.

        One for the tensor, one per row, or one per block.
        """
        scale, rows = self._read(info).float(), value.shape[0]
        if scale.numel() <= 1:
            return scale
        if len(info.shape) == 2 and len(whole) == 2 and info.shape != (whole[0], 1):
            high, wide = (
                block_size(size, count) for size, count in zip(whole, info.shape, strict=True)
            )
            blocks = scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)
            return blocks[start : start + rows, : whole[1]]
        return scale.reshape(-1, *[1] * (value.ndim - 1))[start : start + rows]


def block_size(size: int, blocks: int) -> int:
    """The rows or columns of a block, for `size` of them in `blocks`. The last may be smaller."""
    return FP8_BLOCK if -(-size // FP8_BLOCK) == blocks else -(-size // blocks)


def rounded_input(x: Tensor, rounding: tuple[str, float]) -> Tensor:
    """x rounded as a kernel for quantized activations rounds it, in x's shape and dtype.

    rounding: the attribute INPUT of the weight. x is rounded to BF16 first, because the layers of a
    server get BF16: then both sides round the same values to the same codes.
    """
    kind, scale = rounding
    if not x.numel():
        return x
    if kind in ("fp8", BY_TOKEN):
        limit, value = torch.finfo(torch.float8_e4m3fn).max, x.bfloat16().float()
        if kind == BY_TOKEN:
            scale = value.abs().amax(-1, keepdim=True).clamp(min=1e-12) / limit
        codes = (value / scale).clamp(-limit, limit).to(torch.float8_e4m3fn)
        return (codes.float() * scale).to(x.dtype)
    from nibble_kernels.activation_quant import nvfp4_quant
    from nibble_kernels.conversions import e2m1_decode, e4m3_decode

    inverse = 1 / torch.tensor(scale, dtype=torch.float32, device=x.device)
    packed, scales = nvfp4_quant(
        x.bfloat16().reshape(-1, x.shape[-1]).contiguous(), inverse, tiled=False
    )
    values = (
        e2m1_decode(packed).unflatten(-1, (-1, 16)) * (e4m3_decode(scales) / inverse)[..., None]
    )
    return values.flatten(-2).view(x.shape).to(x.dtype)
