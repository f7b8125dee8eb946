"""Compiles FlashInfer's sampling kernels while the engine imports and loads, instead of after it.

vLLM 0.32 needs them in its last warm-up, where nvcc took 60 s of a first start on an H200
(FlashInfer's log in tests/unit/data). FlashInfer's lock makes the engine wait for the rest. It is
off where the GPU shares the host's memory: compilers beside a load double its peak there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from nibble.machine.processes import die_with_parent
from nibble.plan.models.gemma4 import has_flashinfer_compiler
from nibble.plan.plan import Plan

# flashinfer 0.7.0.post1 jit/core.py: `need_lock` takes the lock that the engine's own build waits
# for.
_COMPILE = "from flashinfer.jit.sampling import gen_sampling_module as g; g().build(need_lock=True)"
_MODULE = ".cache/flashinfer/*/*/cached_ops/sampling/sampling.so"
_PACKAGED = "data/aot/sampling/sampling.so"  # docker/steps/build_flashinfer.py puts it there
COMPILERS_BYTES = 16 << 30  # free host memory that three nvcc and the load leave alone
_NICE = 5


def should_prebuild(plan: Plan, child: Mapping[str, str]) -> bool:
    """Whether the engine would compile them in its warm-up. `child` is vLLM's environment."""
    if (
        plan.target.device != "cuda"
        or plan.target.memory.kind != "discrete"
        or plan.hardware.assumed
    ):
        return False
    if child.get("VLLM_USE_FLASHINFER_SAMPLER", "1") == "0" or "FLASHINFER_DISABLE_JIT" in child:
        return False
    if plan.hardware.memory_available_bytes < COMPILERS_BYTES or not has_flashinfer_compiler(child):
        return False
    base = Path(child.get("FLASHINFER_WORKSPACE_BASE") or child.get("HOME") or Path.home())
    return not is_packaged() and not any(base.glob(_MODULE))


def is_packaged() -> bool:
    """Whether FlashInfer has compiled kernels: in an image, or from flashinfer-jit-cache."""
    found = find_spec("flashinfer")
    built = (
        found is not None
        and found.origin is not None
        and (Path(found.origin).parent / _PACKAGED).exists()
    )
    return built or find_spec("flashinfer_jit_cache") is not None


def compiler_environ(plan: Plan, child: Mapping[str, str]) -> dict[str, str]:
    """vLLM's environment without the GPU, with the architecture that FlashInfer detects."""
    found = {_architecture(gpu.capability) for gpu in plan.hardware.gpus}
    told = {"FLASHINFER_CUDA_ARCH_LIST": " ".join(sorted(found))}  # unless the user set it
    return {**told, **child, "CUDA_VISIBLE_DEVICES": ""}


def _architecture(capability: tuple[int, int]) -> str:
    return "12.0f" if capability == (12, 0) else f"{capability[0]}.{capability[1]}a"


@contextlib.contextmanager
def prebuilding(plan: Plan, child: Mapping[str, str]) -> Iterator[bool]:
    """Compile during the block; True if it does. The engine reports a failure. Call from the main
    thread.
    """
    if not should_prebuild(plan, child):
        yield False
        return
    compiler = subprocess.Popen(
        ["nice", "-n", str(_NICE), sys.executable, "-P", "-c", _COMPILE],
        env=compiler_environ(plan, child),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 - no other thread runs yet
    )
    try:
        yield True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(compiler.pid, signal.SIGKILL)
        compiler.wait()
