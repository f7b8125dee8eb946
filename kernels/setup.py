"""Builds the compiled parts: C++ where there is a compiler, CUDA where there is nvcc and
TORCH_CUDA_ARCH_LIST names targets.

Against torch's stable ABI of 2.11 and Python's of 3.11, so that one wheel loads into any later
version of either.
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))
import cross_build

wheel_options = {"py_limited_api": "cp311"}
if target := cross_build.target_packages():
    wheel_options["plat_name"] = cross_build.platform_tag()
    cuda_home, cuda_version = cross_build.cuda_home(), cross_build.cuda_version(target)
    BuildExtension = cross_build.CrossBuildExtension
    CppExtension = CUDAExtension = Extension
else:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

    cuda_home, cuda_version = CUDA_HOME, torch.version.cuda

STABLE_ABI = [
    "-DTORCH_TARGET_VERSION=0x020B000000000000ULL",
    "-DTORCH_STABLE_ONLY",
    "-DPy_LIMITED_API=0x030B0000",
]
# No contraction: where a fused multiply-add is meant, the code says so, and every compiler rounds
# alike.
CXX_FLAGS = [
    "-O3",
    "-std=c++20",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-g0",
]
NVCC_FLAGS = [
    "-O3",
    "-std=c++20",
    "-fmad=false",
    "--expt-relaxed-constexpr",
    "-lineinfo",
    "-DUSE_CUDA",
]
SOURCES = Path("src/nibble_kernels")
COMPILED_FROM = {".cpp", ".cu", ".h", ".hpp", ".cuh"}


def gencode(arch_list: str) -> list[str]:
    """'9.0a;12.0f' as nvcc's flags. torch's own reading refuses the family targets (12.0f)."""
    names = [arch.replace(".", "") for arch in arch_list.replace(";", " ").split()]
    return [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]


class BuildWithSources(build_py):
    """Adds _sources.json: sha256 of all that the modules are made from. Binaries differ from build
    to build; nibble/engine/installed.py tells builds apart by this file.
    """

    def run(self) -> None:
        super().run()
        files = [
            Path("setup.py"),
            Path("cross_build.py"),
            *(path for path in SOURCES.rglob("*") if path.suffix in COMPILED_FROM),
        ]
        found = {path.as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        if any(one.name.endswith("._cuda") for one in extensions):
            found["TORCH_CUDA_ARCH_LIST"] = arch_list
        place = Path(self.build_lib, SOURCES.name, "_sources.json")
        place.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


def extension(make: type, name: str, pattern: str, **flags: list[str]):
    return make(
        f"nibble_kernels.{name}",
        sorted(str(path) for path in SOURCES.glob(pattern)),
        include_dirs=[str((SOURCES / "include").absolute()), str(SOURCES.absolute())],
        extra_compile_args={kind: STABLE_ABI + words for kind, words in flags.items()},
        py_limited_api=True,
    )


extensions = []
arch_list = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
wanted = os.environ.get("NIBBLE_KERNELS_COMPILE") != "0"
if wanted and shutil.which(os.environ.get("CXX", "c++")):
    extensions.append(extension(CppExtension, "_cpu", "**/*.cpp", cxx=CXX_FLAGS))
    if arch_list and cuda_home and cuda_version:
        nvcc = NVCC_FLAGS + gencode(arch_list)
        extensions.append(extension(CUDAExtension, "_cuda", "**/*.cu", cxx=CXX_FLAGS, nvcc=nvcc))
else:
    why = "no C++ compiler here" if wanted else "NIBBLE_KERNELS_COMPILE=0"
    print(f"nibble-kernels: {why}, so only the plain torch code is installed")

setup(
    ext_modules=extensions,
    cmdclass={"build_ext": BuildExtension, "build_py": BuildWithSources},
    options={"bdist_wheel": wheel_options},
)
