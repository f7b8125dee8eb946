"""VLLM_BATCH_INVARIANT on a GPU: NVFP4 kernels that add in a fixed order. Pure.

vLLM takes its own such kernels whatever backend a flag names. For weight-only layers nibble's
plugin takes nibble's kernel (vllm 0.32 kernels/linear/__init__.py:1145,
nibble/engine/plugin/kernels.py). With another backend in a flag, the start would end after the
load, when nibble compares the kernels that ran.
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
from nibble.plan.fp4_products import serves_in_fp4
from nibble.plan.inputs import PlanInputs
from nibble.plan.nvfp4_options import asked
from nibble.recipes.rules import in_effect

ADDS_IN_ONE_ORDER = (GPU_LINEAR, "CutlassNvFp4LinearKernel")
NAMES = {"nibble": "nibble's kernel", "cutlass": "CUTLASS", "emulation": "vLLM's emulation"}


def is_batch_invariant(environ: Mapping[str, str]) -> bool:
    """Whether results must not depend on the batch."""
    return environ.get(INVARIANT, "0").strip() not in ("", "0")


def check_one_order(inputs: PlanInputs, args: Mapping[str, Any]) -> None:
    """Raise CONFIG if a flag names a kernel without a fixed order, or if the required kernel is not
    installed.
    """
    checkpoint = inputs.checkpoint
    if (
        checkpoint is None
        or inputs.target.device != "cuda"
        or not is_batch_invariant(inputs.environ)
    ):
        return
    if asked(args).get("moe_kernel") == "nibble":
        what = (
            f"NIBBLE_MOE_KERNEL=nibble is set with {INVARIANT}, but its sums depend on the number"
            " of tokens"
        )
        action = f"unset NIBBLE_MOE_KERNEL or drop --moe-kernel, or unset {INVARIANT}"
        raise NibbleError(ExitCode.CONFIG, what=what, expected="vLLM's experts", action=action)
    is_ours = asked(args).get("linear_kernel") == "nibble"
    if is_ours and serves_in_fp4(checkpoint, inputs.target):
        what = (
            f"NIBBLE_LINEAR_KERNEL=nibble is set with {INVARIANT}, but the order of its W4A4 sums"
            " depends on the number of rows"
        )
        action = (
            "set NIBBLE_NVFP4_ACTIVATIONS=bf16, or unset NIBBLE_LINEAR_KERNEL or drop"
            f" --linear-kernel, or unset {INVARIANT}"
        )
        raise NibbleError(ExitCode.CONFIG, what=what, expected="vLLM's kernel", action=action)
    kernels = (
        kernels_in_one_order(checkpoint, inputs.target)
        if _may_have_nvfp4_layers(checkpoint)
        else set()
    )
    if "nibble" in kernels and inputs.without_gpu_kernels:
        what = (
            f"{INVARIANT} needs nibble's kernel for the NVFP4 weights of {checkpoint.id}:"
            f" {inputs.without_gpu_kernels}"
        )
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="nibble-kernels with its CUDA kernels",
            action=f"install it, or unset {INVARIANT}",
        )
    backend = in_effect("--linear-backend", args)
    if kernels and backend != "auto" and kernels != {backend}:
        required = " and ".join(NAMES[name] for name in sorted(kernels))
        what = (
            f"--linear-backend {backend} is set with {INVARIANT}, which needs {required} for the"
            f" NVFP4 layers of {checkpoint.id}"
        )
        action = (
            "drop --linear-backend, or override a recipe's with `--linear-backend auto`, or unset"
            f" {INVARIANT}"
        )
        raise NibbleError(ExitCode.CONFIG, what=what, expected="no --linear-backend", action=action)


def kernels_in_one_order(checkpoint: Checkpoint, target: Target) -> set[str]:
    """The kernels that vLLM and the plugin take for a checkpoint's linear layers, as values of
    --linear-backend. `nibble` is not one of vLLM's values.
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


def _may_have_nvfp4_layers(checkpoint: Checkpoint) -> bool:
    """Whether linear layers are NVFP4 or may be; Quartet II's become NVFP4 at load."""
    becomes = checkpoint.scheme.vllm_quantization == "quartet2"
    return becomes or checkpoint.weights is None or bool(dense_weights(checkpoint.nvfp4))
