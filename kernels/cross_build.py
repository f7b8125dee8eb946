"""Compiles the modules for another processor than this one's, with a cross compiler.

torch cannot be imported for that: what is here would be the other processor's. So nothing of torch
is used but its headers and the names in its libraries.

    CXX=aarch64-linux-gnu-g++ NIBBLE_KERNELS_TARGET_PACKAGES=/arm64/site-packages pip wheel …

The folder is the site-packages of an installation for the target, with torch in it and, for CUDA,
with the wheels that torch requires (their libcudart is linked against).
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

VARIABLE = "NIBBLE_KERNELS_TARGET_PACKAGES"
# What torch.utils.cpp_extension (2.13) adds to every call of nvcc.
TORCH_NVCC_FLAGS = [
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
]
TORCH_LIBRARIES = ["c10", "torch_cpu"]
CUDA_LIBRARIES = ["torch_cuda", ":libcudart.so.13"]


def target_packages() -> Path | None:
    """The site-packages of the target, if this is a build for another processor."""
    folder = os.environ.get(VARIABLE)
    return Path(folder) if folder else None


def cuda_home() -> str | None:
    """The CUDA toolkit of this machine: its nvcc compiles for every processor."""
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return home
    for nvcc in (shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"):
        # PATH may have a script that calls nvcc; its folder has no toolkit.
        if (
            nvcc
            and (home := Path(nvcc).resolve().parents[1])
            .joinpath("include/cuda_runtime.h")
            .is_file()
        ):
            return str(home)
    return None


def cuda_version(packages: Path) -> str | None:
    """CUDA's version of the target's torch, None for a CPU build of it."""
    version = packages / "torch/version.py"
    if not version.is_file():
        sys.exit(f"error: no torch in {VARIABLE}={packages}; expected: a site-packages folder")
    return runpy.run_path(str(version))["cuda"]


def platform_tag() -> str:
    """The wheel's platform, from the compiler: linux_aarch64."""
    compiler = os.environ.get("CXX")
    if not compiler:
        sys.exit(f"error: {VARIABLE} without CXX; expected: the cross compiler in CXX")
    machine = subprocess.run(
        [compiler, "-dumpmachine"], capture_output=True, text=True, check=True
    ).stdout
    return f"linux_{machine.partition('-')[0]}"


class CrossBuildExtension(build_ext):
    """Compiles every source by itself, as many at once as MAX_JOBS or this machine's cores."""

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        with ThreadPoolExecutor(jobs) as pool:
            objects = list(pool.map(lambda source: self._compile(ext, Path(source)), ext.sources))
        self._link(ext, objects, output)

    def _compile(self, ext: Extension, source: Path) -> Path:
        made = Path(self.build_temp, source).with_suffix(f"{source.suffix}.o")
        made.parent.mkdir(parents=True, exist_ok=True)
        include = Path(os.environ[VARIABLE], "torch/include")
        folders = [*ext.include_dirs, include, include / "torch/csrc/api/include"]
        defined = f"-DTORCH_EXTENSION_NAME={ext.name.rpartition('.')[2]}"
        compiler = os.environ["CXX"]
        if source.suffix == ".cu":
            # With a foreign compiler nvcc looks for headers where only toolkits for cross compiling
            # have them; they are the same.
            home = cuda_home()
            command = [f"{home}/bin/nvcc", "-ccbin", compiler, "-Xcompiler", "-fPIC"]
            command += [f"-I{home}/include", f"-I{home}/include/cccl"]
            command += [*TORCH_NVCC_FLAGS, *ext.extra_compile_args["nvcc"]]
        else:
            command = [compiler, "-fPIC", "-DNDEBUG", "-fwrapv", *ext.extra_compile_args["cxx"]]
        command += [f"-I{folder}" for folder in folders]
        self._run([*command, defined, "-c", str(source), "-o", str(made)])
        return made

    def _link(self, ext: Extension, objects: list[Path], output: Path) -> None:
        libraries = list(TORCH_LIBRARIES)
        if any(source.endswith(".cu") for source in ext.sources):
            libraries += CUDA_LIBRARIES
        packages = Path(os.environ[VARIABLE])
        folders = [packages / "torch/lib", packages / "nvidia/cu13/lib"]
        command = [os.environ["CXX"], "-shared", "-Wl,--no-undefined", "-Wl,--as-needed"]
        command += ["-Wl,--allow-shlib-undefined", *map(str, objects)]
        command += [f"-L{folder}" for folder in folders] + [f"-l{name}" for name in libraries]
        self._run([*command, "-o", str(output)])

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stderr.write(f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}\n")
            raise SystemExit(f"error: {command[0]} failed with {done.returncode}")
