"""The cost of checking a checkpoint's tensors before a load, and of tracking what the load writes.

    python benchmarks/checkpoint_checks.py [--out benchmarks/results/checkpoint_checks.json]

CPU seconds on generated NVFP4 checkpoints with many small tensors, so that the time is per tensor
and not per byte. vLLM's loader runs in this process, alternately with and without nibble's
tracking. The first run of each pair also includes imports.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PAIRS = 4


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return round(time.process_time() - began, 2)


def before_a_load(folder: Path) -> dict[str, Any]:
    """Each check alone, on a checkpoint that has been read."""
    from nibble.checkpoint import read_checkpoint
    from nibble.checkpoint.layer_tensors import layer_problems
    from nibble.checkpoint.verify import check_scales
    from nibble.serve.preflight.model import check_values

    found = read_checkpoint(str(folder))
    shapes = (
        found.tensors,
        found.nvfp4,
        found.text_config,
        found.model_type,
        found.num_layers,
    )
    return {
        "tensors": len(found.tensors),
        "headers_s": cpu_seconds(lambda: read_checkpoint(str(folder))),
        "names_and_shapes_s": cpu_seconds(lambda: layer_problems(*shapes)),
        "plausibility_s": cpu_seconds(lambda: check_values(found, True)),
        "block_scales_s": cpu_seconds(lambda: check_scales(found, True)),
    }


def during_a_load(folder: Path) -> dict[str, Any]:
    """vLLM's loader with and without nibble's tracking, alternately."""
    import vllm.model_executor.models.registry as registry
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.plugins import load_general_plugins
    from vllm.utils.torch_utils import set_default_torch_dtype

    from nibble.checkpoint import read_checkpoint
    from tests.support.in_vllm import loads_in_vllm

    setattr(registry, "_run_in_subprocess", lambda function: function())  # noqa: B010 - no process for each model class
    load_general_plugins()
    loads_in_vllm.start_groups()

    def load(extra: dict[str, Any]) -> float:
        config = EngineArgs(
            str(folder),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=256,
            model_loader_extra_config=extra,
        ).create_engine_config()
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(vllm_config=config)
            loader = get_model_loader(config.load_config)
            return cpu_seconds(lambda: loader.load_weights(model, config.model_config))

    pairs = [(load({}), load({"enable_weights_track": False})) for _ in range(PAIRS)]
    tensors = len(read_checkpoint(str(folder)).tensors)
    return {
        "tensors": tensors,
        "followed_s": [one for one, _ in pairs],
        "not_followed_s": [one for _, one in pairs],
    }


def main() -> int:
    from machine import machine

    from tests.support.models.generated_nvfp4 import Shape, write_checkpoint

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "checkpoint_checks.json"
    )
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as scratch:
        many, fewer = Path(scratch) / "many", Path(scratch) / "fewer"
        write_checkpoint(
            many, Shape(layers=24, experts=464, hidden=64, intermediate=64), "modelopt"
        )
        write_checkpoint(
            fewer, Shape(layers=8, experts=256, hidden=64, intermediate=64), "modelopt"
        )
        result = {
            "command": "python benchmarks/checkpoint_checks.py", "machine": machine(),
            "before_a_load": before_a_load(many), "during_a_load": during_a_load(fewer),
        }  # fmt: skip
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in ("before_a_load", "during_a_load")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
