"""The patched source archive configures for every target, and its NVFP4, FP8 and Marlin kernels
compile for GB10 as they should.

Real are vLLM's CMakeLists.txt up to its external projects, its sources with the series applied,
torch's CMake code for TORCH_CUDA_ARCH_LIST, cmake as the images pin it, and nvcc; each source is
compiled by the very command that CMake wrote down. Stand-ins are, for want of anything but a
package index: a TorchConfig.cmake around the CPU build of torch, whose own has CUDA switched off;
FlashInfer's copy of CUTLASS 4.5.0 where vLLM fetches v4.7.1 (VLLM_CUTLASS_SRC_DIR); one type of
cublas_v2.h. Left out are the external projects, and with them vLLM's demand for GCC 13, which is
theirs (CMakeLists.txt:1568).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from nibble.engine.fatbin import Code, gpu_objects
from nibble.engine.gpu_code import CORE, FAMILY_CODE, MARLIN_FP4, MOE
from nibble.machine.targets import load_target
from tests.support.changes import PATCHING
from tests.support.releases import cuda_tools
from tests.support.releases.trees import patched, pristine, source_tree

pytestmark = [
    pytest.mark.when_changed(*PATCHING),
    pytest.mark.vllm,
    pytest.mark.skipif(not cuda_tools.NVCC.exists(), reason=f"no {cuda_tools.NVCC}"),
]
FIRST_EXTERNAL_PROJECT = "# For CUDA and HIP builds also build the triton_kernels external package."
TORCH_CONFIG = """
set(Torch_VERSION {version})
set(TORCH_INCLUDE_DIRS {torch}/include {torch}/include/torch/csrc/api/include)
set(CAFFE2_USE_CUDA ON)
include({torch}/share/cmake/Caffe2/public/utils.cmake)
include({torch}/share/cmake/Caffe2/public/cuda.cmake)
add_library(torch INTERFACE IMPORTED)
target_include_directories(torch INTERFACE ${{TORCH_INCLUDE_DIRS}})
set(TORCH_LIBRARIES torch)
if(NOT TARGET CUDA::cuda_driver)  # libcuda.so comes with a driver, and nothing is linked here
  add_library(CUDA::cuda_driver INTERFACE IMPORTED)
endif()
"""
FP4 = "csrc/quantization/fp4"
MARLIN = "csrc/quantization/marlin"
SCALED_MM = "csrc/quantization/w8a8/cutlass"
DISPATCHERS = (
    f"{SCALED_MM}/scaled_mm_entry.cu",
    f"{FP4}/nvfp4_quant_entry.cu",
    f"{FP4}/nvfp4_scaled_mm_entry.cu",
)


@dataclass(frozen=True)
class Command:
    """How CMake would compile one source."""

    words: str
    directory: Path
    output: Path

    @property
    def codes(self) -> set[str]:
        """What it is built for: {"120f"}, {"80", "PTX 80"}."""
        told = re.findall(r"-gencode arch=\S+,code=(sm|compute)_(\w+)", self.words)
        return {number if kind == "sm" else f"PTX {number}" for kind, number in told}


Configured = Callable[[str], Mapping[str, Command]]


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Configured:
    """Source -> its command, for a TORCH_CUDA_ARCH_LIST; all are configured side by side when
    the first is asked for.
    """
    folder = tmp_path_factory.mktemp("source")
    tree = patched(folder / "patched", tree=source_tree("0.32.0"))
    lists = ("12.1a", "12.0f", "10.0f", "9.0a")
    found: dict[str, dict[str, Command]] = {}

    def get(arch_list: str) -> Mapping[str, Command]:
        if not found:
            with ThreadPoolExecutor(2) as pool:
                found.update(
                    zip(
                        lists,
                        pool.map(lambda one: configure(tree, folder / one, one), lists),
                        strict=True,
                    )
                )
        return found[arch_list]

    return get


def configure(tree: Path, folder: Path, arch_list: str) -> dict[str, Command]:
    """Run vLLM's CMake in `folder` and read what it would compile, and how."""
    source, build, config = folder / "vllm", folder / "build", folder / "torch"
    for name in (
        "csrc",
        "cmake",
    ):  # copied for each: kernels are generated into csrc, by architecture
        shutil.copytree(tree / name, source / name)
    lines, external, _ = (tree / "CMakeLists.txt").read_text().partition(FIRST_EXTERNAL_PROJECT)
    assert external, "CMakeLists.txt has changed: where do its external projects begin?"
    (source / "CMakeLists.txt").write_text(lines)
    config.mkdir()
    torch = Path(sysconfig.get_path("purelib")) / "torch"
    (config / "TorchConfig.cmake").write_text(TORCH_CONFIG.format(torch=torch, version="2.13.0"))
    (config / "cublas_v2.h").write_text("typedef struct cublasContext *cublasHandle_t;\n")
    cutlass = pristine("0.32.0") / "flashinfer/data/cutlass"
    definitions = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
        "FETCHCONTENT_FULLY_DISCONNECTED": "ON",
        "VLLM_PYTHON_EXECUTABLE": sys.executable,
        "Torch_DIR": config,
        "VLLM_CUTLASS_SRC_DIR": cutlass,
        # These three CUTLASS's own CMakeLists.txt sets, which FlashInfer leaves out
        "CUTLASS_DIR": cutlass,
        "CUTLASS_INCLUDE_DIR": cutlass / "include",
        "CUTLASS_TOOLS_UTIL_INCLUDE_DIR": cutlass / "tools/util/include",
    }
    words = [cuda_tools.cmake(), "-G", "Ninja", "-S", source, "-B", build]
    words += [f"-D{name}={value}" for name, value in definitions.items()]
    done = subprocess.run(
        words,
        env=environment(TORCH_CUDA_ARCH_LIST=arch_list),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    entries = json.loads((build / "compile_commands.json").read_text())
    return {
        str(Path(entry["file"]).relative_to(source)): Command(
            f"{entry['command']} -I{config}",
            Path(entry["directory"]),
            Path(entry["directory"], entry["output"]),
        )
        for entry in entries
    }


def environment(**more: str) -> dict[str, str]:
    path = f"{cuda_tools.CUDA}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | more


def sources(commands: Mapping[str, Command], module: str, stem: str) -> list[Command]:
    """The commands for the source of that name in one module."""
    folder = f"CMakeFiles/{module}.dir/"
    return [
        one
        for name, one in commands.items()
        if Path(name).stem == stem and folder in str(one.output)
    ]


@pytest.mark.parametrize(
    ("arch_list", "major", "allowed"),
    [
        ("12.1a", 12, {"120f", "121a"}),
        ("12.0f", 12, {"120f", "121a"}),
        ("10.0f", 10, {"100f"}),
        ("9.0a", 9, {"90a"}),
    ],
)
def test_it_configures_with_family_code_for_every_kernel_that_needs_it(
    arch_list: str, major: int, allowed: set[str], configured: Configured
) -> None:
    """The list that the build-time check holds a wheel against is what CMake builds; nothing on
    it is plain 120 or 121.
    """
    commands = configured(arch_list)
    for module, names in FAMILY_CODE[major].items():
        for name in names:
            (command,) = sources(commands, module, name)
            assert command.codes <= allowed and command.codes, f"{name}: {command.codes}"


@pytest.mark.parametrize("target", ["gb10", "sm120", "b200", "hopper"])
def test_everything_that_a_target_compiles_has_code_it_can_load(
    target: str, configured: Configured
) -> None:
    capabilities = load_target(target).capabilities
    stuck = {}
    for name, command in configured(load_target(target).torch_cuda_arch_list).items():
        codes = [as_code(one) for one in command.codes]
        if codes and not all(
            any(code.runs_on(capability) for code in codes) for capability in capabilities
        ):
            stuck[name] = command.codes
    assert not stuck


def as_code(text: str) -> Code:
    number = text.removeprefix("PTX ")
    digits = number.rstrip("af")
    return Code(int(digits), number[len(digits) :], text.startswith("PTX "))


@pytest.mark.parametrize("arch_list", ["12.1a", "12.0f"])
def test_the_dispatchers_know_the_sm120_kernels(arch_list: str, configured: Configured) -> None:
    """Seed row 6: the definitions are on their command lines."""
    for name in DISPATCHERS:
        words = configured(arch_list)[name].words.split()
        assert {"-DENABLE_SCALED_MM_SM120=1", "-DENABLE_NVFP4_SM120=1"} <= set(words)


def test_marlin_for_fp4_weights_is_in_both_modules_of_every_target(configured: Configured) -> None:
    for arch_list in ("12.1a", "12.0f", "10.0f", "9.0a"):
        for module in (CORE, MOE):
            assert all(sources(configured(arch_list), module, name) for name in MARLIN_FP4)


@pytest.mark.parametrize(
    "source",
    [
        f"{FP4}/nvfp4_quant_kernels.cu",
        f"{MARLIN}/sm80_kernel_float16_fe2m1f_float16.cu",
        # 50 s
        pytest.param(f"{MARLIN}/sm80_kernel_bfloat16_fe2m1f_bfloat16.cu", marks=pytest.mark.slow),
        # 4 minutes and 6 GB
        pytest.param(f"{FP4}/nvfp4_scaled_mm_sm120_kernels.cu", marks=pytest.mark.slow),
        # 4 minutes and 9 GB
        pytest.param(f"{SCALED_MM}/c3x/scaled_mm_sm120_fp8.cu", marks=pytest.mark.slow),
    ],
    ids=lambda source: Path(source).stem,
)
def test_it_compiles_for_gb10_to_the_instructions_of_the_released_wheel(
    source: str, configured: Configured
) -> None:
    """By CMake's command, for 120f and nothing else."""
    command = configured(load_target("gb10").torch_cuda_arch_list)[source]
    command.output.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        command.words,
        shell=True,
        cwd=command.directory,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (made,) = gpu_objects(command.output)
    assert (made.name, made.codes) == (Path(source).stem, (Code(120, "f"),))
    assert cuda_tools.gb10_instructions(command.output) == cuda_tools.GB10_INSTRUCTIONS[made.name]
