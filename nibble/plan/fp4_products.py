"""Where nibble's kernels multiply FP4 activations: W4A4 checkpoints on SM12x. Pure."""

from __future__ import annotations

from nibble.checkpoint import Checkpoint
from nibble.engine.contract import FP4_PRODUCTS
from nibble.machine.targets import Target
from nibble.plan.linear_shapes import linear_uses
from nibble.trials.trial import shape_name

# Of a weight's columns on each GPU: kernels/src/nibble_kernels/nvfp4_linear/w4a4.py.
COLUMN_MULTIPLE = 32


def has_our_fp4_products(target: Target) -> bool:
    """Whether nibble's W4A4 kernels are made for a target's GPUs. Others emulate them."""
    majors = {major for major, _ in target.capabilities}
    return target.features.has_fp4_mma and majors == {FP4_PRODUCTS}


def serves_in_fp4(checkpoint: Checkpoint | None, target: Target) -> bool:
    """Whether nibble's kernels would multiply a checkpoint's activations in FP4. `checkpoint`: with
    the activations that the server uses.
    """
    return (
        has_our_fp4_products(target)
        and checkpoint is not None
        and checkpoint.scheme.is_nvfp4
        and checkpoint.scheme.vllm_quantization != "quartet2"  # has its own products
        and "fp4" in checkpoint.scheme.activations.split("+")
    )


def columns_problem(checkpoint: Checkpoint, tensor_parallel: int) -> str:
    """A linear layer whose columns the W4A4 kernel does not take; empty without one."""
    shapes = (use.shape for use in linear_uses(checkpoint, tensor_parallel, "fp4"))
    odd = next((shape for shape in shapes if shape[1] % COLUMN_MULTIPLE), None)
    if odd is None:
        return ""
    return (
        f"a layer of {shape_name(odd)} on a GPU has columns that are not a multiple of"
        f" {COLUMN_MULTIPLE}"
    )
