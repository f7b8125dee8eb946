"""Ask vLLM itself what a model keeps per sequence: `python kv_specs_of_vllm.py REQUESTS.json
ANSWERS.json`.

Models are built on the meta device (shapes, no weights), so that a tensor-parallel rank of a large
model costs nothing; then vLLM's own code aligns block sizes and gives each layer's KV cache spec.
Runs in a separate process because vLLM keeps the distributed groups as globals.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import socket
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

import torch
import vllm.model_executor.models.registry as registry
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import get_tp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core.kv_cache_utils import _pool_bytes_per_block, get_kv_cache_groups
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, get_kv_quant_mode
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

# Vision models import torchvision, whose PyPI build breaks beside a CPU torch. Building shapes
# calls nothing in it.
if importlib.util.find_spec("torchvision") is None:
    for module in (
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.functional",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
        "torchvision.ops",
        "torchvision.io",
    ):
        sys.modules[module] = MagicMock(
            __spec__=importlib.machinery.ModuleSpec(module, None), __path__=[]
        )
# With AVX512-BF16 the CPU platform turns an `auto` state into float32; no other platform does
# (cpu.py:303).
torch.cpu._is_avx512_bf16_supported = lambda: False
# The registry looks at every model class in a separate process, 5 s each; this is such a process
# already.
registry._run_in_subprocess = lambda function: function()


def engine_config(request: dict[str, Any]) -> VllmConfig:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(request["config"]))
    options = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enforce_eager": True,
        "trust_remote_code": False,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 4,
        **request["options"],
    }
    return EngineArgs(**options).create_engine_config()


def start_groups(config: VllmConfig) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, backend="gloo")
        initialize_model_parallel(1)


def layer_specs(config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Specs of one tensor-parallel rank: models ask the group for its size when they shape their
    layers.
    """
    get_tp_group().world_size = config.parallel_config.tensor_parallel_size
    with (
        set_current_vllm_config(config),
        set_default_torch_dtype(torch.bfloat16),
        torch.device("meta"),
    ):
        initialize_model(vllm_config=config)
        if config.speculative_config is not None:
            initialize_model(
                vllm_config=config, model_config=config.speculative_config.draft_model_config
            )
        current_platform.update_block_size_for_backend(config)
        return get_kv_cache_spec(config)


def in_cache_dtype(config: VllmConfig, name: str, spec: KVCacheSpec, dtype: str) -> KVCacheSpec:
    """`spec` stored in `dtype`, packed by the backend that serves it (the CPU's own backend has
    none of them).
    """
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend

    if not isinstance(spec, AttentionSpec):
        return spec
    if dtype.startswith("turboquant"):
        skipped = TurboQuantConfig.get_boundary_skip_layers(config.model_config)
        if str(extract_layer_index(name)) in skipped:
            return spec
    spec = replace(
        spec, dtype=STR_DTYPE_TO_TORCH_DTYPE[dtype], kv_quant_mode=get_kv_quant_mode(dtype)
    )
    return TurboQuantAttentionBackend.customize_spec(TritonAttentionBackend.customize_spec(spec))


def answer(request: dict[str, Any]) -> dict[str, Any]:
    config = engine_config(request)
    specs = layer_specs(config)
    if dtype := request.get("cache_dtype"):
        specs = {name: in_cache_dtype(config, name, spec, dtype) for name, spec in specs.items()}
    config.cache_config.kv_cache_layout = "BLHNC"  # has a place for pages of any sizes
    return {
        "block_size": config.cache_config.block_size,
        "block_bytes": _pool_bytes_per_block(config, get_kv_cache_groups(config, specs)),
        "in_flight_tokens": config.max_in_flight_tokens,
        "max_model_len": config.model_config.max_model_len,
        "layers": [
            {
                "name": name,
                "spec": type(spec).__name__,
                "bytes": spec.max_memory_usage_bytes(config),
            }
            for name, spec in specs.items()
        ],
    }


def main() -> None:
    requests = json.loads(Path(sys.argv[1]).read_text())
    answers: dict[str, Any] = {}
    start_groups(engine_config(requests.pop("_groups")))
    for name, request in requests.items():
        try:
            answers[name] = answer(request)
        except Exception:
            answers[name] = {"error": traceback.format_exc()}
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
