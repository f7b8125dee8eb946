"""Chooses the kernel of an NVFP4 linear layer.

nibble's kernel on the CPU and where an option or VLLM_BATCH_INVARIANT requires it; else vLLM's
choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel
from vllm.platforms import PlatformEnum, current_platform

from nibble.engine.plugin import w4a4
from nibble.engine.plugin.cpu import CpuNvFp4LinearKernel
from nibble.engine.plugin.cuda import NibbleNvFp4LinearKernel, require_ours
from nibble.engine.plugin.options import current_options
from nibble.engine.plugin.require import required

logger = init_logger(f"vllm.{__name__}")  # vLLM shows messages of loggers below this name

# Of the layer that is being built: rows and columns on this GPU.
_shape: ContextVar[tuple[int, int]] = ContextVar("shape", default=(0, 0))


@contextmanager
def building(rows: int, columns: int) -> Iterator[None]:
    """While vLLM builds a layer of this shape: its methods choose a kernel without it."""
    token = _shape.set((rows, columns))
    try:
        yield
    finally:
        _shape.reset(token)


def register_cpu_kernel() -> None:
    """Register NVFP4 kernels for the CPU platform, for which vLLM 0.32 has none
    (kernels/linear/__init__.py:574).

    vLLM's emulation comes second, for --linear-backend emulation.
    """
    required(linear, "init_nvfp4_linear_kernel", "use_a16")
    required(linear, "_get_linear_backend", "quantization")
    register = required(linear, "register_linear_kernel", "kernel_class", "platform", "kernel_type")
    for kernel in (CpuNvFp4LinearKernel, linear.EmulationNvFp4LinearKernel):
        register(kernel, PlatformEnum.CPU, "nvfp4")


def nvfp4_linear_kernel(use_a16: bool = False) -> NvFp4LinearKernel:
    """Replaces vLLM's init_nvfp4_linear_kernel, which has only GPU kernels for weight-only layers
    (lines 1132 and 1179 of vllm 0.32 kernels/linear/__init__.py).

    use_a16: activations stay unquantized. Within `building`, the layer's shape counts too.
    """
    options = current_options()
    if options.linear_kernel == "nibble" and not options.leaves_to_vllm(*_shape.get()):
        return _nibble_kernel(use_a16)
    if use_a16 and current_platform.is_cpu():
        return CpuNvFp4LinearKernel(NvFp4LinearLayerConfig())
    if use_a16 and envs.VLLM_BATCH_INVARIANT:
        return _batch_invariant()
    return linear.init_nvfp4_linear_kernel(use_a16)


def _nibble_kernel(use_a16: bool) -> NvFp4LinearKernel:
    """nibble's GPU kernel. Raises ValueError if it cannot run."""
    backend = linear._get_linear_backend(quantization="nvfp4_w4a16" if use_a16 else "nvfp4_w4a4")
    in_fp4 = not use_a16 and w4a4.multiplies_fp4()
    flag = "" if backend == "auto" else f"--linear-backend {backend}"
    require_ours("kernel", use_a16 or in_fp4, flag)
    if not in_fp4:
        return NibbleNvFp4LinearKernel(NvFp4LinearLayerConfig())
    w4a4.check_linear_options()
    return w4a4.NibbleNvFp4W4A4LinearKernel(NvFp4LinearLayerConfig())


def _batch_invariant() -> NvFp4LinearKernel:
    """nibble's GPU kernel, for weight-only layers with VLLM_BATCH_INVARIANT. Raises ValueError.

    Its order of additions does not depend on the number of rows. vLLM has no such kernel: it forces
    CUTLASS or the emulation, and then refuses them (lines 1145 and 1188 of vllm 0.32
    kernels/linear/__init__.py). As in vLLM, the variable overrides --linear-backend.
    """
    supported, reason = NibbleNvFp4LinearKernel.is_supported()
    if not supported:
        raise ValueError(
            "VLLM_BATCH_INVARIANT with NVFP4 weights alone needs nibble's kernel, which cannot"
            f" run: {reason}"
        )
    backend = linear._get_linear_backend(quantization="nvfp4_w4a16")
    if backend != "auto":
        logger.warning_once(
            "VLLM_BATCH_INVARIANT overrides --linear-backend=%s: nibble's kernel", backend
        )
    return NibbleNvFp4LinearKernel(NvFp4LinearLayerConfig())


def is_marlin(kernel: NvFp4LinearKernel) -> bool:
    """Whether the kernel is Marlin, which stores block scales in a narrower format."""
    return isinstance(kernel, MarlinNvFp4LinearKernel)
