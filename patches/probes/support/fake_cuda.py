"""A GPU of any capability, pretended to an unchanged vLLM tree: which kernels and backends it would
choose there.

Only what asks the hardware, the toolchain and the network is replaced: torch.cuda's questions,
vLLM's platform object, the compiled extension modules (their Python-visible support predicates
answer as the sources of vLLM 0.32's CUDA 13 wheel do), CUDA_HOME with an `nvcc` that only states
its version, and `requests.get`. The code that decides is the tree's own. Call `become` once, before
anything of vllm is imported: a probe has a separate process.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
import types
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

GIB = 1 << 30
SM120, SM121, SM100, SM90 = (12, 0), (12, 1), (10, 0), (9, 0)
# capability -> device name, SM count, memory, by NVIDIA's specifications
DEVICES = {
    SM121: ("NVIDIA GB10", 48, 121.6 * GIB),
    SM120: ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188, 95 * GIB),
    SM100: ("NVIDIA B200", 148, 178 * GIB),
    SM90: ("NVIDIA H200", 132, 139.7 * GIB),
}
EXTENSIONS = (
    "_C",
    "_moe_C",
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "_qutlass_C",
    "_flashmla_C",
    "_flashmla_extension_C",
    "_deepselect_C",
    "_flashkda_C",
    "cumem_allocator",
    "spinloop",
    "vllm_flash_attn._vllm_fa2_C",
    "vllm_flash_attn._vllm_fa3_C",
)


@dataclass(frozen=True)
class Machine:
    """What is pretended."""

    capability: tuple[int, int]
    name: str
    sm_count: int
    memory_bytes: int


def become(
    capability: tuple[int, int],
    *,
    nvcc: str | None = "13.0",
    ninja: bool = True,
    cubin: bool = False,
    jit_cache: tuple[str, ...] = (),
    online: bool = False,
    name: str | None = None,
    sm_count: int | None = None,
    memory_bytes: int | None = None,
) -> Machine:
    """Pretend to be one GPU of this capability, before vllm is imported.

    nvcc       release the compiler in CUDA_HOME states, or None for no compiler anywhere
    ninja      whether `ninja` is on PATH
    cubin      whether the package flashinfer-cubin is installed
    jit_cache  what flashinfer-jit-cache has providers for, such as sm90a; empty: it is not
    installed
    online     whether HTTP requests succeed (status 200) or fail
    """
    if "vllm" in sys.modules:
        raise RuntimeError("fake_cuda.become comes before `import vllm`")
    default = DEVICES[capability]
    machine = Machine(
        capability, name or default[0], sm_count or default[1], int(memory_bytes or default[2])
    )
    scratch = Path(tempfile.mkdtemp(prefix="fake-cuda-"))
    # At the end of this process alone, also of one that multiprocessing made, which leaves out
    # atexit's.
    Finalize(None, shutil.rmtree, (scratch, True), exitpriority=1)
    _toolchain(scratch, nvcc, ninja)
    _packages(scratch, cubin, jit_cache)
    _network(online)
    _torch(machine)
    _extensions(capability)
    _platform(machine)
    return machine


def has_flashinfer_package() -> bool:
    """Whether flashinfer-python is importable here; probes about it are not applicable without
    it.
    """
    return importlib.util.find_spec("flashinfer") is not None


def _toolchain(scratch: Path, nvcc: str | None, ninja: bool) -> None:
    """CUDA_HOME and a PATH that hold exactly the tools asked for."""
    tools, home = scratch / "bin", scratch / "cuda"
    tools.mkdir()
    for tool in (
        "sh",
        "env",
        "ls",
        "cat",
        "uname",
        "ldconfig",
        "gcc",
        "g++",
        "cc",
        "c++",
        "as",
        "ld",
    ):
        if found := shutil.which(tool):
            (tools / tool).symlink_to(found)
    if ninja:
        _script(tools / "ninja", "echo 1.13.0")
    os.environ["PATH"] = str(tools)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        os.environ[variable] = str(home if nvcc else scratch / "nonexistent")
    for variable in ("FLASHINFER_NVCC", "FLASHINFER_CUDA_ARCH_LIST", "VLLM_HAS_FLASHINFER_CUBIN"):
        os.environ.pop(variable, None)
    if nvcc:
        (home / "bin").mkdir(parents=True)
        text = f"Cuda compilation tools, release {nvcc}, V{nvcc}.88"
        _script(home / "bin" / "nvcc", f"echo '{text}'")
        os.environ["PATH"] += f":{home / 'bin'}"


def _script(path: Path, command: str) -> None:
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)


def _packages(scratch: Path, cubin: bool, jit_cache: tuple[str, ...]) -> None:
    """FlashInfer's prebuilt packages as what their presence is asked by: a module and its
    metadata of the same version.
    """
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(scratch)
    version = importlib.metadata.version("flashinfer-python") if has_flashinfer_package() else "0"
    site = scratch / "site"
    folder = str(site / "kernels")
    if cubin:
        _package(
            site, "flashinfer_cubin", version, f"def get_cubin_dir():\n    return {folder!r}\n"
        )
    else:
        sys.modules["flashinfer_cubin"] = None  # type: ignore[assignment]  # not even one that is installed
    if jit_cache:
        # flashinfer 0.7 jit/env.py:184 asks for the providers, one a target; 0.6 for the folder.
        text = JIT_CACHE.format(version=f"{version}+cu130", folder=folder, targets=jit_cache)
        _package(site, "flashinfer_jit_cache", f"{version}+cu130", text)
    else:
        sys.modules["flashinfer_jit_cache"] = None  # type: ignore[assignment]
    sys.path.insert(0, str(site))


JIT_CACHE = """
from types import SimpleNamespace

def get_jit_cache_dir():
    return {folder!r}

def get_jit_cache_providers():
    return tuple(
        SimpleNamespace(
            provider_id=target, distribution="flashinfer-jit-cache-" + target, version={version!r},
            jit_cache_dir={folder!r}, cuda_architectures=frozenset([target]), modules=frozenset(),
        )
        for target in {targets!r}
    )
"""


def _package(site: Path, module: str, version: str, text: str) -> None:
    (site / module).mkdir(parents=True)
    (site / module / "__init__.py").write_text(f"__version__ = {version!r}\n{text}")
    info = site / f"{module}-{version}.dist-info"
    info.mkdir()
    name = module.replace("_", "-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _network(online: bool) -> None:
    import requests

    def get(url: str, *_: Any, **__: Any) -> Any:
        if not online:
            raise requests.ConnectionError(f"no network: {url}")
        return types.SimpleNamespace(status_code=200, ok=True, content=b"", text="")

    requests.get = get


def _torch(machine: Machine) -> None:
    """torch.cuda's questions; nothing here can compute on a GPU."""
    import torch

    major, minor = machine.capability
    properties = types.SimpleNamespace(
        name=machine.name,
        major=major,
        minor=minor,
        total_memory=machine.memory_bytes,
        multi_processor_count=machine.sm_count,
        is_integrated=machine.capability == SM121,
        warp_size=32,
        shared_memory_per_block_optin=101376 if major == 12 else 232448,
        L2_cache_size=128 << 20,
        max_threads_per_multi_processor=1536 if major == 12 else 2048,
        regs_per_multiprocessor=65536,
    )
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: machine.capability,
        "get_device_name": lambda device=None: machine.name,
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (machine.memory_bytes, machine.memory_bytes),
        "_device_count_nvml": lambda: 1,
    }
    for question, answer in answers.items():
        setattr(torch.cuda, question, answer)
    torch.version.cuda = "13.0"
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.is_available = lambda: True


def _extensions(capability: tuple[int, int]) -> None:
    """The compiled modules as empty ones, and the operators that answer what they were compiled
    for.
    """
    for extension in EXTENSIONS:
        module = types.ModuleType(f"vllm.{extension}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    import torch

    # vllm 0.32 csrc: scaled_mm_entry.cu cutlass_scaled_mm_supports_*, nvfp4_scaled_mm_entry.cu:71
    # with both ENABLE_ flags.
    predicates = {
        "cutlass_scaled_mm_supports_fp4": lambda cap: 100 <= cap < 130,
        "cutlass_scaled_mm_supports_fp8": lambda cap: cap >= 89,
        "cutlass_scaled_mm_supports_block_fp8": lambda cap: cap >= 90,
        "cutlass_group_gemm_supported": lambda cap: cap in (90, 100, 103, 110),
        "cutlass_sparse_scaled_mm_supported": lambda cap: cap == 90,
    }
    library = torch.library.Library("_C", "FRAGMENT")
    for name, answer in predicates.items():
        library.define(f"{name}(int cuda_device_capability) -> bool")
        library.impl(name, answer, "CompositeExplicitAutograd")
    KEPT.append(library)


KEPT: list[Any] = []  # a torch Library unregisters when it is collected


def _platform(machine: Machine) -> None:
    """vLLM's CUDA platform with the questions to NVML answered."""
    import vllm.platforms as platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class FakePlatform(CudaPlatformBase):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*machine.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return machine.name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return machine.memory_bytes

        @classmethod
        def get_device_uuid(cls, device_id: int = 0) -> str:
            return "GPU-00000000-0000-0000-0000-000000000000"

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return 1

        @classmethod
        def log_warnings(cls) -> None: ...

    platforms._current_platform = FakePlatform()  # type: ignore[attr-defined]
