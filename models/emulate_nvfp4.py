"""An NVFP4 checkpoint (ModelOpt, W4A4) in transformers: weights dequantized, inputs rounded as
vLLM rounds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from nibble_kernels.activation_quant import nvfp4_quant
from nibble_kernels.conversions import e2m1_decode, e4m3_decode
from nibble_kernels.weight_quant import Nvfp4Weight, dequantize
from safetensors.torch import load_file
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from nibble.checkpoint.convert.calibrate import watched

Merge = Callable[[dict[str, Tensor]], None]


@contextmanager
def nvfp4_model(model_dir: Path, merge: Merge = lambda tensors: None) -> Iterator[Any]:
    """The model in float32, computing as W4A4 within the context. `merge` may change the
    checkpoint's tensors first.
    """
    tensors = load_file(model_dir / "model.safetensors")
    merge(tensors)
    inverses = {
        name.removesuffix(".input_scale"): 1 / scale
        for name, scale in tensors.items()
        if name.endswith(".input_scale")
    }
    config: Any = AutoConfig.from_pretrained(model_dir)
    del config.quantization_config  # transformers has no reader for it
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # the Auto class wants a folder
    weights = dequantized(tensors)
    model = model_class.from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.float32
    )

    def rounded(names: tuple[str, ...], x: Tensor) -> Tensor:
        inverse = inverses.get(names[0])
        return x if inverse is None or not x.numel() else fake_activation(x, inverse)

    with watched(model, rounded):
        yield model


def fake_activation(x: Tensor, inverse: Tensor) -> Tensor:
    """x [..., K] rounded to NVFP4 with the static scale 1 / `inverse` and back, in x's type."""
    packed, scales = nvfp4_quant(x.bfloat16().reshape(-1, x.shape[-1]), inverse, tiled=False)
    values = (
        e2m1_decode(packed).unflatten(-1, (-1, 16)) * (e4m3_decode(scales) / inverse)[..., None]
    )
    return values.flatten(-2).view(x.shape).to(x.dtype)


def dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A ModelOpt checkpoint's tensors as those of the model it was made from, in float32."""
    found = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if f"{module}.weight_scale_2" in tensors:
            scales = (tensors[f"{module}.weight_scale"], tensors[f"{module}.weight_scale_2"])
            found[name] = dequantize(Nvfp4Weight(tensor, *scales))
        elif not name.endswith(("scale", "scale_2")):
            found[name] = tensor.float()
    return found
