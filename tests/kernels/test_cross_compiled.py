"""The wheel for another processor, from this one's compilers: kernels/cross_build.py."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from nibble.engine.fatbin import Code, gpu_objects, needed_libraries
from tests.support.changes import OPERATORS
from tests.support.kernels.kernel_build import KERNELS
from tests.support.releases.cuda_tools import CUDA, NVCC

COMPILER = "aarch64-linux-gnu-g++"
ARM64 = 183  # e_machine of an ELF file

needs_compiler = pytest.mark.skipif(not shutil.which(COMPILER), reason=f"no {COMPILER} here")


def build(folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """`pip wheel` of a copy of the sources into folder/dist."""
    copy = folder / "kernels"
    shutil.copytree(KERNELS, copy, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    words = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    words += ["--no-index", "--wheel-dir", str(folder / "dist"), str(copy)]
    kept = {name: value for name, value in os.environ.items() if name != "CXX"}
    return subprocess.run(words, capture_output=True, text=True, check=False, env=kept | environ)


def refusal(folder: Path, **environ: str) -> str:
    done = build(folder, **environ)
    assert done.returncode != 0
    found = re.search(r"error: (?!subprocess|metadata|Failed)[^\n]*", done.stdout + done.stderr)
    assert found, done.stdout + done.stderr
    return found[0]


def test_what_a_cross_build_lacks_is_named(tmp_path: Path) -> None:
    nothing = str(tmp_path / "none")
    assert "expected: the cross compiler in CXX" in refusal(
        tmp_path / "a", NIBBLE_KERNELS_TARGET_PACKAGES=nothing
    )
    assert f"no torch in NIBBLE_KERNELS_TARGET_PACKAGES={nothing}" in refusal(
        tmp_path / "b", NIBBLE_KERNELS_TARGET_PACKAGES=nothing, CXX="g++"
    )


def library(path: Path, functions: str = "") -> None:
    """An Arm library that has these functions of C and nothing in them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    words = [COMPILER.replace("g++", "gcc"), "-shared", f"-Wl,-soname,{path.name}", "-o", str(path)]
    subprocess.run([*words, "-xc", "-"], input=functions, text=True, check=True)


@pytest.fixture
def arm_packages(tmp_path: Path) -> Path:
    """site-packages of an Arm installation, as far as a build looks: torch's headers, which are the
    same everywhere, and libraries with torch's stable interface.
    """
    site, here = tmp_path / "site-packages", Path(torch.__file__).parent
    (site / "torch").mkdir(parents=True)
    (site / "torch/include").symlink_to(here / "include")
    (site / "torch/version.py").write_text("cuda = '13.0'\n")
    headers = [*here.glob("include/torch/csrc/stable/c/*.h")]
    headers += here.glob("include/torch/csrc/inductor/aoti_torch/c/*.h")
    headers += here.glob("include/torch/csrc/inductor/aoti_torch/generated/*.h")
    names = {
        name
        for header in headers
        for name in re.findall(r"\b((?:aoti_)?torch_\w+)\(", header.read_text())
    }
    on_gpus = {"aoti_torch_get_current_cuda_stream"}
    library(site / "torch/lib/libc10.so")
    functions = "".join(f"void {name}(void) {{}}\n" for name in sorted(names - on_gpus))
    library(site / "torch/lib/libtorch_cpu.so", functions)
    library(site / "torch/lib/libtorch_cuda.so", f"void {on_gpus.pop()}(void) {{}}\n")
    header = (CUDA / "include/cuda_runtime_api.h").read_text() if NVCC.exists() else ""
    runtime = set(re.findall(r"\b(cuda[A-Z]\w+)\(", header))
    runtime |= {
        f"__cudaRegister{what}" for what in ("FatBinary", "FatBinaryEnd", "Function", "Var")
    }
    runtime |= {"__cudaUnregisterFatBinary", "__cudaInitModule", "cudaLaunchKernelExC"}
    runtime |= {"__cudaPushCallConfiguration", "__cudaPopCallConfiguration", "__cudaLaunchKernel"}
    runtime |= {"__cudaGetKernel"}
    cudart = site / "nvidia/cu13/lib/libcudart.so.13"
    library(cudart, "".join(f"void {name}(void) {{}}\n" for name in sorted(runtime)))
    return site


@pytest.mark.slow
@pytest.mark.when_changed(*OPERATORS)
@needs_compiler
def test_a_wheel_for_arm_is_built_here(tmp_path: Path, arm_packages: Path) -> None:
    environ = {"CXX": COMPILER, "NIBBLE_KERNELS_TARGET_PACKAGES": str(arm_packages)}
    if NVCC.exists():
        environ |= {"TORCH_CUDA_ARCH_LIST": "12.0f", "CUDA_HOME": str(CUDA)}
    done = build(tmp_path, **environ)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name.endswith("-cp311-abi3-linux_aarch64.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "wheel")
    modules = {path.name: path for path in (tmp_path / "wheel/nibble_kernels").glob("*.so")}
    assert set(modules) == {"_cpu.abi3.so"} | ({"_cuda.abi3.so"} if NVCC.exists() else set())
    for module in modules.values():
        assert struct.unpack_from("<H", module.read_bytes(), 18) == (ARM64,)
        assert "libtorch_cpu.so" in needed_libraries(module)
    if cuda := modules.get("_cuda.abi3.so"):
        assert "libcudart.so.13" in needed_libraries(cuda)
        objects = gpu_objects(cuda)
        assert len(objects) > 10 and {one.codes for one in objects} == {(Code(120, "f"),)}
