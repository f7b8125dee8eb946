"""Errors of one fused q/k/v layer with unequal global scales, in every kernel of vLLM.

    python benchmarks/nvfp4_layers.py [--device cuda] [--out results.json]

The weights have unequal scales (K = 1024; q 256 rows N(0, .02), k 64 rows N(0, .05), v 64 rows t5 *
.008, numpy seed 7). Each is quantized separately and loaded by vLLM's weight loaders, as ModelOpt
and compressed-tensors checkpoints, W4A4 and W4A16. `own` is vLLM alone, `merged` is vLLM with
nibble's plugin. Each error is the relative Frobenius norm of one part's outputs against float64.
`original` compares with the unquantized weights and activations, `stored` with the values that the
tensors represent.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

COLUMNS, ROWS, TOKENS = 1024, {"q": 256, "k": 64, "v": 64}, 64
TIME_LIMIT_S = 120
ROUTED = "fp4-as-bf16"  # a W4A4 checkpoint with NIBBLE_NVFP4_ACTIVATIONS=bf16
LINEAR_KERNELS = {
    "cpu": ("auto", "emulation"),
    "cuda": ("marlin", "humming", "emulation", "nibble"),
}


def main() -> None:
    """Run every case in a separate process and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--cases", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cases:
        with distributed_environment(options.device):
            for case in options.cases:
                form, activations, kernel, plugin = case.split(",")
                print(
                    json.dumps(run_case(form, activations, kernel, plugin, options.device)),
                    flush=True,
                )
        return
    cases = [
        (form, activations, kernel, plugin)
        for form in ("modelopt", "compressed-tensors")
        for activations in ("fp4", "bf16", ROUTED)
        for kernel in LINEAR_KERNELS[options.device]
        for plugin in ("own", "merged")
        if plugin == "merged" or (activations != ROUTED and kernel != "nibble")
    ]
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(lambda case: in_a_process(case, options.device), cases):
            results.append(result)
            print(show(result), flush=True)
    if options.out:
        options.out.write_text(
            json.dumps({"machine": machine(), "cases": results}, indent=1) + "\n"
        )


def in_a_process(case: tuple[str, ...], device: str) -> dict[str, Any]:
    """The case with its errors, or with the error line of a refusal."""
    words = [sys.executable, __file__, "--device", device, "--cases", ",".join(case)]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=TIME_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return case_names(case) | {"refused": f"no answer within {TIME_LIMIT_S} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found = (
        json.loads(lines[-1]) if lines else {"refused": done.stderr.strip().splitlines()[-1][-200:]}
    )
    return case_names(case) | found


def case_names(case: tuple[str, ...]) -> dict[str, Any]:
    """The case as keys of a result."""
    return dict(zip(("form", "activations", "kernel", "scales"), case, strict=True))


def show(result: dict[str, Any]) -> str:
    """One line of the table."""
    words = (
        f"{result['form']:19}{result['activations']:12}{result['kernel']:10}{result['scales']:8}"
    )
    if "refused" in result:
        return words + result["refused"]
    parts = "  ".join(
        f"{part} {errors['original']:7.2%} ({errors['stored']:.1e})"
        for part, errors in result["errors"].items()
    )
    return f"{words}{result['class']:28}{parts}"


def run_case(form: str, activations: str, kernel: str, scales: str, device: str) -> dict[str, Any]:
    """Errors of q, k and v, and the kernel's class. After a merged case a process can run no other
    kind.
    """
    options = {"nvfp4_activations": "bf16"} if activations == ROUTED else {}
    with vllm_config(kernel, options):
        if scales == "merged":
            from nibble.engine.plugin import register

            register()
        elif device == "cpu":
            give_cpu_the_emulation()
        weights = parts()
        layer, loaded = make_layer(form, activations, weights, device)
        x = torch.randn(TOKENS, COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()
        out = layer(x.to(device))[0].cpu().double()
        chosen = type(getattr(layer.quant_method, "kernel", None) or layer.scheme.kernel).__name__
        is_quantized = (
            activations == "fp4"
            and kernel not in ("marlin", "nibble")
            and not ("Humming" in chosen and device == "cuda")
        )
        errors = {}
        for (name, weight), columns in zip(
            weights.items(), out.split(list(ROWS.values()), 1), strict=True
        ):
            stored = x_as_computed(x, loaded["input_scale"], is_quantized) @ loaded[name].T
            errors[name] = {
                "original": relative(columns, x.double() @ weight.double().T),
                "stored": relative(columns, stored),
            }
        return {"class": chosen.removesuffix("LinearKernel"), "errors": errors}


def parts() -> dict[str, Tensor]:
    """The BF16 weights that the top of this file describes."""
    rng = np.random.default_rng(7)
    drawn = {
        "q": rng.standard_normal((ROWS["q"], COLUMNS)) * 0.02,
        "k": rng.standard_normal((ROWS["k"], COLUMNS)) * 0.05,
        "v": rng.standard_t(5, (ROWS["v"], COLUMNS)) * 0.008,
    }
    return {
        name: torch.tensor(values, dtype=torch.float32).bfloat16() for name, values in drawn.items()
    }


@contextmanager
def distributed_environment(device: str) -> Iterator[None]:
    """The process state that vLLM's layers need; all cases of a process share it."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "VLLM_PLUGINS": ""}
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    torch.set_default_dtype(torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        with set_current_vllm_config(VllmConfig()):
            backend = "nccl" if device == "cuda" else "gloo"
            init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, backend)
            initialize_model_parallel(1)
        yield
        # with 4 GPUs in the machine a process that did not do so hung at its end
        cleanup_dist_env_and_memory()


@contextmanager
def vllm_config(kernel: str, options: dict[str, str]) -> Iterator[None]:
    """A vLLM configuration with this --linear-backend and these options of the plugin."""
    from vllm.config import KernelConfig, VllmConfig, set_current_vllm_config

    backend = KernelConfig(linear_backend="auto" if kernel == "nibble" else kernel)
    if kernel == "nibble":
        options = options | {"linear_kernel": "nibble"}
    with set_current_vllm_config(
        VllmConfig(kernel_config=backend, additional_config={"nibble": options})
    ):
        yield


def give_cpu_the_emulation() -> None:
    """Add the row that vLLM's table of CPU kernels lacks. The kernel is vLLM's."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    linear.register_linear_kernel(linear.EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")


def make_layer(
    form: str, activations: str, weights: dict[str, Tensor], device: str
) -> tuple[Any, dict[str, Tensor]]:
    """vLLM's QKVParallelLinear, loaded and processed, and the values of its tensors in float64."""
    from nibble_kernels.weight_quant import dequantize, quantize
    from vllm.model_executor.layers.linear import QKVParallelLinear

    heads = {"head_size": 64, "total_num_heads": ROWS["q"] // 64, "total_num_kv_heads": 1}
    config = CONFIGS[form](activations)
    with torch.device(device):
        layer = QKVParallelLinear(
            COLUMNS, **heads, bias=False, quant_config=config, prefix="qkv_proj"
        )
    amax_x, divisor = 4.5, form == "compressed-tensors"  # of 65536 normal numbers
    input_scale = torch.tensor(amax_x / 2688, dtype=torch.float32)
    loaded: dict[str, Tensor] = {"input_scale": input_scale}
    for name, weight in weights.items():
        quantized = quantize(weight)
        loaded[name] = dequantize(quantized).double()
        tensors = {
            "weight_packed" if divisor else "weight": quantized.packed,
            "weight_scale": quantized.scales,
            "weight_global_scale" if divisor else "weight_scale_2": (
                1 / quantized.global_scale if divisor else quantized.global_scale
            ),
        }
        if activations != "bf16":
            tensors["input_global_scale" if divisor else "input_scale"] = (
                1 / input_scale if divisor else input_scale
            )
        for suffix, tensor in tensors.items():
            parameter = getattr(layer, suffix)
            parameter.weight_loader(
                parameter, tensor.reshape(1) if divisor and not tensor.ndim else tensor, name
            )
    layer.quant_method.process_weights_after_loading(layer)
    return layer, loaded


def _modelopt(activations: str) -> Any:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    return ModelOptNvFp4Config(
        "W4A16_NVFP4" if activations == "bf16" else "NVFP4", True, None, [], 16
    )


def _compressed_tensors(activations: str) -> Any:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    from nibble.checkpoint.convert.config import compressed_tensors

    return CompressedTensorsConfig.from_config(
        compressed_tensors("bf16" if activations == "bf16" else "fp4", ignore=[], kv_cache=None)
    )


CONFIGS: dict[str, Callable[[str], Any]] = {
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
}


def x_as_computed(x: Tensor, input_scale: Tensor, is_quantized: bool) -> Tensor:
    """The activations after the kernel's rounding, in float64."""
    if not is_quantized:
        return x.double()
    from nibble_kernels.activation_quant import nvfp4_quant
    from nibble_kernels.conversions import e2m1_decode

    codes, scales = nvfp4_quant(x, (1 / input_scale).reshape(1), tiled=False)
    return (
        e2m1_decode(codes).double().unflatten(-1, (-1, 16)) * scales.double()[..., None]
    ).flatten(-2) * input_scale.double()


def relative(found: Tensor, expected: Tensor) -> float:
    """Relative Frobenius norm of the difference."""
    return float((found - expected).norm() / expected.norm())


if __name__ == "__main__":
    main()
