"""Builds `mtp.fc` of the MTP heads of Qwen3-Next and Qwen3.5 in the format of the checkpoint.

Published checkpoints have it in BF16 but omit it from their list of unquantized layers, so vLLM
0.32 builds it unquantized for every ModelOpt NVFP4 checkpoint (qwen3_next_mtp.py:72,
qwen3_5_mtp.py:91). Only the stored tensors show whether it is in NVFP4. The plugin replaces the
class of the layer through vLLM's `register_oot`.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import ColumnParallelLinear

from nibble.engine.plugin.require import required

LAYER = "mtp.fc"
INDEX = "model.safetensors.index.json"


def register_draft_projection() -> None:
    """Make vLLM build StoredColumnParallelLinear in place of ColumnParallelLinear.

    Raises VllmMismatch.
    """
    names = ("input_size", "output_size", "quant_config", "prefix")
    required(ColumnParallelLinear, "__init__", "self", *names)
    register = required(ColumnParallelLinear, "register_oot")
    register(StoredColumnParallelLinear, name="ColumnParallelLinear")


class StoredColumnParallelLinear(ColumnParallelLinear):
    """ColumnParallelLinear with the checkpoint's quantization for `mtp.fc` if that is in NVFP4."""

    def __init__(self, *args, **kwargs) -> None:
        if kwargs.get("prefix") == LAYER and kwargs.get("quant_config") is None:
            config = get_current_vllm_config()
            quantization = config.quant_config
            if quantization is not None and quantization.get_name() == "modelopt_fp4":
                model = config.model_config
                if f"{LAYER}.weight_scale" in _stored_names(model.model, model.revision):
                    kwargs["quant_config"] = quantization
        super().__init__(*args, **kwargs)


def _stored_names(model: str, revision: str | None) -> frozenset[str]:
    """The names of a checkpoint's tensors. `model`: a folder, or a repository that is already
    downloaded.
    """
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
    if (folder / INDEX).is_file():
        return frozenset(json.loads((folder / INDEX).read_text())["weight_map"])
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names.update(tensors.keys())
    return frozenset(names)
