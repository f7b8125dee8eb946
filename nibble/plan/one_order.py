"""VLLM_BATCH_INVARIANT on a GPU: NVFP4 kernels with a fixed order of additions. Pure.

vLLM takes its own of them whatever backend is named, and for weights alone nibble's plugin takes
nibble's (vllm 0.32 kernels/linear/__init__.py:1145,
nibble/engine/plugin/kernels.py). Another that is named would end the start after
the load, when what ran is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.nvfp4 import dense_weights
from nibble.engine.contract import BATCH_INVARIANT as INVARIANT
from nibble.engine.contract import GPU_LINEAR
from nibble.errors import ExitCode, NibbleError
from nibble.machine.targets import Target
from nibble.plan.inputs import Ingredients
from nibble.plan.nvfp4_options import asked
from nibble.recipes.rules import in_effect

ADDS_IN_ONE_ORDER = (GPU_LINEAR, "CutlassNvFp4LinearKernel")
NAMES = {"nibble": "nibble's kernel", "cutlass": "CUTLASS", "emulation": "vLLM's emulation"}


def is_batch_invariant(environ: Mapping[str, str]) -> bool:
    """Whether vLLM has to compute results that do not depend on the batch."""
    return environ.get(INVARIANT, "0").strip() not in ("", "0")


def check_one_order(parts: Ingredients, args: Mapping[str, Any]) -> None:
    """Raise CONFIG where a kernel is named that does not add in one order, and where the one
    that does is not here.
    """
    checkpoint = parts.checkpoint
    if checkpoint is None or parts.target.device != "cuda" or not is_batch_invariant(parts.environ):
        return
    if asked(args).get("moe_kernel") == "nibble":
        what = (
            f"NIBBLE_MOE_KERNEL=nibble is set with {INVARIANT}, but its sums depend on the"
            f" number of"
            " tokens"
        )
        action = f"unset NIBBLE_MOE_KERNEL or drop --moe-kernel, or unset {INVARIANT}"
        raise NibbleError(ExitCode.CONFIG, what=what, expected="vLLM's experts", action=action)
    kernels = (
        kernels_in_one_order(checkpoint, parts.target) if _may_have_layers(checkpoint) else set()
    )
    if "nibble" in kernels and parts.without_gpu_kernels:
        what = (
            f"{INVARIANT} needs nibble's kernel for the NVFP4 weights of {checkpoint.id}:"
            f" {parts.without_gpu_kernels}"
        )
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="nibble-kernels with its CUDA kernels",
            action=f"install it, or unset {INVARIANT}",
        )
    backend = in_effect("--linear-backend", args)
    if kernels and backend != "auto" and kernels != {backend}:
        takes = " and ".join(NAMES[name] for name in sorted(kernels))
        what = (
            f"--linear-backend {backend} is set with {INVARIANT}, which needs {takes} for the NVFP4"
            f" layers of {checkpoint.id}"
        )
        action = (
            "drop --linear-backend, or override a recipe's with `--linear-backend auto`, or unset"
            f" {INVARIANT}"
        )
        raise NibbleError(ExitCode.CONFIG, what=what, expected="no --linear-backend", action=action)


def kernels_in_one_order(checkpoint: Checkpoint, target: Target) -> set[str]:
    """What vLLM and the plugin take for a checkpoint's linear layers, as --linear-backend calls
    it; `nibble` it does not know.
    """
    scheme, has_product = checkpoint.scheme, target.features.has_fp4_mma
    if scheme.vllm_quantization == "quartet2":
        return {"cutlass" if has_product and "fp4" in scheme.activations else "nibble"}
    if not scheme.is_nvfp4:
        return set()
    four_bits = (
        {"cutlass" if has_product else "emulation"} if "fp4" in scheme.activations else set()
    )
    return four_bits | ({"nibble"} if "bf16" in scheme.activations else set())


def _may_have_layers(checkpoint: Checkpoint) -> bool:
    """Whether linear layers are NVFP4, as far as is known, or become so (Quartet II)."""
    becomes = checkpoint.scheme.vllm_quantization == "quartet2"
    return becomes or checkpoint.weights is None or bool(dense_weights(checkpoint.nvfp4))
