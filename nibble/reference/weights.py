"""A checkpoint's tensors as numbers: NVFP4 and FP8 dequantized, one piece at a time.

Runs in the child process that computes a reference, which is the one place of nibble that imports
torch.
"""

from __future__ import annotations

from collections.abc import Mapping

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
# Attribute of a weight: how what it is multiplied with is rounded. A server may leave the inputs of
# FP8 weights in BF16, or round those to FP8 for which the checkpoint has no scale (`by token`):
# that difference is part of a layer's noise.
INPUT, BY_TOKEN = "nibble_input", "fp8 by token"
FP8_BLOCK = 128  # rows and columns with one scale, where their number does not say otherwise


class Unsupported(Exception):
    """Why a checkpoint has no computed reference, in one line."""


class Weights:
    """Tensors of a checkpoint on disk by the name that they have without quantization. A context
    manager.

    `rounds_inputs`: weights carry the scale that their inputs are rounded with (fp4 activations).
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
        """Of the tensor without quantization."""
        if (weight := self._nvfp4.get(name)) is None:
            return self._tensors[name].shape
        if weight.experts:
            return weight.experts, weight.columns, weight.rows
        return weight.rows, weight.columns

    def load(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """The tensor, or its rows [start, stop), in the reference's type."""
        if (weight := self._nvfp4.get(name)) is not None:
            return (
                self._load_stacked(weight, start, stop)
                if weight.experts
                else self._load_nvfp4(weight, start, stop)
            )
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
            data, shape = (
                self._files.read(info, start * row, end * row),
                (end - start, *info.shape[1:]),
            )
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
        """Experts [start, stop) as [experts, K, N], the layout that the file has them in."""
        assert weight.scale is not None and weight.global_scale is not None
        end = weight.experts if stop is None else stop
        found = []
        for expert in range(start, end):
            codes = (
                self._read(weight.weight, expert, expert + 1)[0].view(torch.uint8).T.contiguous()
            )
            scales = self._read(weight.scale, expert, expert + 1)[0].T.contiguous()
            scale = self._multiplier(weight, weight.global_scale).flatten()
            found.append(dequantize(Packed(codes, scales, scale[min(expert, len(scale) - 1)])).T)
        return self._with_input(torch.stack(found), weight, start)

    def _multiplier(self, weight: Nvfp4Weight, info: TensorInfo) -> Tensor:
        value = self._read(info).float()
        return 1 / value if weight.layout == "compressed-tensors" else value

    def _with_input(self, value: Tensor, weight: Nvfp4Weight, expert: int) -> Tensor:
        value = value.to(self._device, self._dtype)
        if self._rounds_inputs and weight.input_scale is not None:
            scale = self._multiplier(weight, weight.input_scale).flatten()
            setattr(value, INPUT, ("fp4", float(scale[min(expert, len(scale) - 1)])))
        return value

    def _load_fp8(self, name: str, value: Tensor, start: int) -> Tensor:
        module = name.removesuffix(".weight")
        info = self._tensors.get(f"{module}.weight_scale") or self._tensors.get(
            f"{module}.weight_scale_inv"
        )
        if info is None:
            raise Unsupported(f"{name} is {value.dtype} without a scale")
        scale, rows = self._read(info).float(), value.shape[0]
        whole = self._tensors[name].shape
        if (
            len(info.shape) == 2
            and len(whole) == 2
            and info.shape != (whole[0], 1)
            and scale.numel() > 1
        ):
            high, wide = (
                block_size(size, count) for size, count in zip(whole, info.shape, strict=True)
            )
            scale = scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)[
                start : start + rows, : whole[1]
            ]
        elif scale.numel() > 1:
            scale = scale.reshape(-1, *[1] * (value.ndim - 1))[start : start + rows]
        result = (value.float() * scale).to(self._device, self._dtype)
        given = self._tensors.get(f"{module}.input_scale")
        if given is not None and given.elements == 1:
            setattr(result, INPUT, ("fp8", float(self._read(given).float().reshape(()))))
        else:
            setattr(result, INPUT, (BY_TOKEN, 0.0))
        return result


def block_size(size: int, blocks: int) -> int:
    """Rows or columns of a block: the last one may have fewer."""
    return FP8_BLOCK if -(-size // FP8_BLOCK) == blocks else -(-size // blocks)


def rounded_input(x: Tensor, how: tuple[str, float]) -> Tensor:
    """x as a kernel for quantized activations reads it, back in x's type.

    A server hands BF16 to its layers; x is rounded to that first, so that both sides meet the same
    midpoints.
    """
    kind, scale = how
    if not x.numel():
        return x
    if kind in ("fp8", BY_TOKEN):
        limit, value = torch.finfo(torch.float8_e4m3fn).max, x.bfloat16().float()
        by = (
            value.abs().amax(-1, keepdim=True).clamp(min=1e-12) / limit
            if kind == BY_TOKEN
            else scale
        )
        return ((value / by).clamp(-limit, limit).to(torch.float8_e4m3fn).float() * by).to(x.dtype)
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


def float_bytes(tensors: Mapping[str, TensorInfo], itemsize: int) -> int:
    """Bytes of all weights once dequantized."""
    packed = {"U8": 2, "F4": 1}
    return sum(
        one.elements * packed.get(one.dtype, 1) * itemsize
        for one in tensors.values()
        if one.elements > 1
    )
