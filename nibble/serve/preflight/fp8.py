"""FP8 layers on the CPU that vLLM 0.32 cannot load, found before it tries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.fused_groups import FUSED
from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.nvfp4 import EXPERT
from nibble.checkpoint.scale_values import TensorFiles, floats
from nibble.errors import ExitCode, NibbleError
from nibble.plan.plan import Plan


def check_fp8_on_cpu(plan: Plan) -> None:
    """Raise CONFIG for a fused FP8 layer whose parts have different scales, on the CPU.

    vLLM requantizes them to the largest with an operator that its CPU libraries declare and do not
    have (vllm 0.32 quantization/utils/w8a8_utils.py:103, torch.ops._C.static_scaled_fp8_quant).
    With equal scales they load and run.
    """
    checkpoint = plan.checkpoint
    if plan.target.device != "cpu" or checkpoint is None or checkpoint.path is None:
        return
    if not str(checkpoint.scheme.vllm_quantization).startswith("modelopt"):
        return
    with TensorFiles(checkpoint.path) as files:
        for scales in _fused_scales(checkpoint):
            values = {floats(files.read(scale, 0, 4)) for scale in scales}
            if len(values) > 1:
                what = (
                    f"{scales[0].name} and {scales[1].name} of {checkpoint.id} differ, and vLLM"
                    " 0.32 fuses their FP8 layers"
                )
                expected = "equal scales for an FP8 layer on the CPU"
                raise NibbleError(
                    ExitCode.CONFIG,
                    what=what,
                    expected=expected,
                    action="serve it on a GPU, or choose another export",
                )


def _fused_scales(checkpoint: Checkpoint) -> Iterator[list[TensorInfo]]:
    """The scales of the parts of each fused layer that are FP8 with one scale a tensor."""
    fused = {part: parts for parts in FUSED for part in parts}
    layers: defaultdict[tuple[str, tuple[str, ...]], list[TensorInfo]] = defaultdict(list)
    for tensor in checkpoint.tensors.values():
        if tensor.dtype != "F8_E4M3" or not tensor.name.endswith(".weight"):
            continue
        module = tensor.name.removesuffix(".weight")
        parent, _, part = module.rpartition(".")
        scale = checkpoint.tensors.get(f"{module}.weight_scale")
        if (
            part in fused
            and scale
            and scale.dtype == "F32"
            and scale.elements == 1
            and not EXPERT.match(module)
        ):
            layers[parent, fused[part]].append(scale)
    return (scales for scales in layers.values() if len(scales) > 1)
