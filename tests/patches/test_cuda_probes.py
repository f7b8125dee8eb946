"""Probes of GPU code, of nvcc and of CMake: that they fail on trees with the defect put in, and
do not answer without tools.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from nibble.engine.patching import run
from nibble.engine.patching.tree import Tree, open_tree
from nibble.machine.paths import root
from tests.support.changes import PATCHING
from tests.support.releases import cuda_tools, trees
from tests.support.releases.gpu_modules import module, write_tree

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*PATCHING)]
needs_nvcc = pytest.mark.skipif(not cuda_tools.NVCC.exists(), reason=f"no {cuda_tools.NVCC}")
SCALED_MM = "csrc/quantization/w8a8/cutlass/scaled_mm_entry.cu"
FP4 = "csrc/quantization/fp4"
SUPPORTED = '8.9;9.0;10.0;11.0;12.0")'


def state(tree: Tree, name: str) -> tuple[str, str]:
    """What a probe says about a tree, in this process."""
    finding = run.load(name).probe(tree)
    return finding.state, finding.detail


def edited(folder: Path, release: str, *edits: tuple[str, str, str]) -> Tree:
    """The source archive of a release, its files linked, with (file, old text, new text)
    replaced.
    """
    trees.copy_of(trees.source_tree(release), folder / "tree")
    for name, old, new in edits:
        path = folder / "tree" / name
        text = path.read_text()
        assert old in text, f"{name} of {release} has changed"
        path.unlink()
        path.write_text(text.replace(old, new))
    return open_tree(folder / "tree")


def with_flashinfer(folder: Path, edits: Mapping[str, tuple[str, str]]) -> Tree:
    """A tree with a FlashInfer in it, its files linked, with FILE: (old text, new text)
    replaced.
    """
    write_tree(folder / "tree", {})
    trees.copy_of(trees.pristine("0.32.0") / "flashinfer", folder / "tree/flashinfer")
    for name, (old, new) in edits.items():
        path = folder / "tree/flashinfer" / name
        text = path.read_text()
        assert old in text, name
        path.unlink()
        path.write_text(text.replace(old, new))
    return open_tree(folder / "tree")


@pytest.fixture
def nvidias_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuobjdump in PATH."""
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{cuda_tools.disassembler()}")


@pytest.mark.parametrize("release", ["0.16.0", "0.32.0"])
@pytest.mark.parametrize("name", ["s04_sm121_dispatch", "s_integrate_gb10_sm121"])
def test_a_dispatcher_that_leaves_121_out_is_found(name: str, release: str, tmp_path: Path) -> None:
    tree = edited(tmp_path, release, (SCALED_MM, "version_num >= 120", "version_num == 120"))
    found, detail = state(tree, name)
    assert (
        found == "defect" and "cutlass_scaled_mm_sm120" not in detail.split(";")[0].split("12.0")[0]
    )


def test_an_fp4_dispatcher_that_leaves_121_out_is_found(tmp_path: Path) -> None:
    tree = edited(
        tmp_path,
        "0.32.0",
        (f"{FP4}/nvfp4_scaled_mm_entry.cu", "sm >= 120 && sm < 130", "sm == 120"),
    )
    assert state(tree, "s04_sm121_dispatch")[0] == "defect"


def test_the_seeds_first_sed_leaves_gb10_without_kernels_in_0_16(tmp_path: Path) -> None:
    tree = edited(
        tmp_path, "0.16.0", ("CMakeLists.txt", SUPPORTED, SUPPORTED.replace("12.0", "12.0;12.1"))
    )
    found, detail = state(tree, "s05_cmake_arch_lists")
    assert found == "defect" and "12.1a: scaled_mm nothing, FP4 nothing" in detail


def test_the_seeds_first_sed_makes_plain_code_of_12_1_in_0_32(tmp_path: Path) -> None:
    tree = edited(
        tmp_path, "0.32.0", ("CMakeLists.txt", SUPPORTED, SUPPORTED.replace("12.0", "12.0;12.1"))
    )
    found, detail = state(tree, "s05_cmake_arch_lists")
    assert found == "defect" and "12.1: scaled_mm 12.1, FP4 12.1" in detail


def test_a_dispatcher_without_its_definition_is_found(tmp_path: Path) -> None:
    line = 'list(APPEND VLLM_GPU_FLAGS "-DENABLE_SCALED_MM_SM120=1")'
    tree = edited(tmp_path, "0.32.0", ("CMakeLists.txt", line, ""))
    assert state(tree, "s06_scaled_mm_define")[0] == "defect"


@needs_nvcc
@pytest.mark.parametrize("header", ["float_subbyte.h", "quantization_utils.cuh"])
@pytest.mark.usefixtures("nvidias_tools")
def test_a_flashinfer_that_converts_in_software_is_found(
    header: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is a published patch: SM121 out of CUTLASS's list."""
    edits = {
        "float_subbyte.h": ("data/cutlass/include/cutlass/float_subbyte.h", "_SM121", "_NONE"),
        "quantization_utils.cuh": (
            "data/csrc/nv_internal/tensorrt_llm/kernels/quantization_utils.cuh",
            "defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 1000)",
            "defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 1000) && (__CUDA_ARCH__ != 1210)",
        ),
    }
    name, old, new = edits[header]
    tree = with_flashinfer(tmp_path, {name: (old, new)})
    monkeypatch.syspath_prepend(tree.root)
    found, detail = state(tree, "s07_flashinfer_e2m1")
    assert found == "defect" and "4 F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C, expected 8" in detail


@needs_nvcc
@pytest.mark.usefixtures("nvidias_tools")
def test_probes_with_the_disassembler_see_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(trees.pristine("0.32.0"))
    native = "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C"
    assert (
        f"121a: 8 {native}" in state(open_tree(trees.pristine("0.32.0")), "s07_flashinfer_e2m1")[1]
    )
    found, detail = state(open_tree(trees.source_tree("0.32.0")), "s10_e2m1_conversion")
    assert (found, detail) == ("sound", f"121a: 4 {native}; 120f: 4 {native}; 121: refused")


@needs_nvcc
@pytest.mark.usefixtures("nvidias_tools")
def test_a_vllm_that_converts_in_software_is_found(tmp_path: Path) -> None:
    start = "inline __device__ uint32_t fp32_vec8_to_e2m1(float (&array)[8]) {\n"
    tree = edited(
        tmp_path,
        "0.32.0",
        (f"{FP4}/nvfp4_utils.cuh", start, start + "  return array[0] > 0.25f ? 1u : 0u;\n"),
    )
    assert state(tree, "s10_e2m1_conversion") == ("defect", "121a: compiles to no E2M1 instruction")


@needs_nvcc
@pytest.mark.parametrize(
    "name", ["s11_fp4_types", "s_patch_cccl_fp4", "s_integrate_cuda_fp4_extension"]
)
def test_a_cuda_whose_header_was_replaced_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As integrate_cuda_fp4_extension.sh leaves it: another file of that name comes first."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include/cuda_fp4.h").write_text(
        "typedef struct { unsigned char data; } cuda_fp4_t;\n"
    )
    wrapper = tmp_path / "bin/nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {cuda_tools.NVCC} -I{tmp_path}/include "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    assert state(open_tree(write_tree(tmp_path / "tree", {})), name)[0] == "defect"


@needs_nvcc
def test_a_flashinfer_as_old_as_the_seeds_is_found(tmp_path: Path) -> None:
    """In a separate process: the probe pretends GPUs to torch."""
    edits = {
        "compilation_context.py": ('(major, "0f")', '(major, "0a")'),
        "data/cutlass/include/cutlass/version.h": (
            "#define CUTLASS_MINOR 5",
            "#define CUTLASS_MINOR 2",
        ),
    }
    (result,) = run.run(with_flashinfer(tmp_path, edits), ["s15_flashinfer_moe_targets"])
    assert result.finding and result.finding.state == "defect"
    assert result.finding.detail == "12.0 and 12.1 give 120a, 121a; CUTLASS 4.2"


def test_an_offer_of_a_grouped_gemm_that_is_not_there_is_found(tmp_path: Path) -> None:
    edits = (
        "vllm/_custom_ops.py",
        "cuda_device_capability >= 110",
        "cuda_device_capability >= 130",
    )
    tree = edited(tmp_path, "0.32.0", edits)
    found, detail = state(tree, "s_integrate_gb10_native")
    assert found == "defect" and "cutlass_moe_mm on 121: not implemented" in detail
    shutil.rmtree(tree.root / "csrc")
    assert state(open_tree(tree.root), "s_integrate_gb10_native")[0] == "not applicable"


FP4_OBJECTS = (
    "nvfp4_quant_kernels",
    "activation_nvfp4_quant_fusion_kernels",
    "nvfp4_experts_quant",
    "nvfp4_scaled_mm_sm120_kernels",
    "nvfp4_blockwise_moe_kernel",
    "scaled_mm_c3x_sm120",
    "scaled_mm_sm120_fp8",
    "scaled_mm_blockwise_sm120_fp8",
)


@pytest.mark.parametrize(
    "name", ["n19_family_code", "s_cutlass_nvfp4", "s_integrate_sm121_fp8_fix"]
)
@pytest.mark.parametrize(
    ("code", "expected"), [("120a", "defect"), ("120f", "sound"), ("121a", "sound")]
)
def test_code_that_gb10_cannot_load_is_found(
    name: str, code: str, expected: str, tmp_path: Path
) -> None:
    core = module({one: [code] for one in FP4_OBJECTS})
    assert (
        state(open_tree(write_tree(tmp_path / "tree", {"_C_stable_libtorch": core})), name)[0]
        == expected
    )


def test_the_check_for_cuda_12_builds_is_what_answers_n19(tmp_path: Path) -> None:
    core = module({one: ["120a"] for one in FP4_OBJECTS}, needed=("libcudart.so.12",))
    tree = open_tree(write_tree(tmp_path / "tree", {"_C_stable_libtorch": core}))
    remedy = run.load("n19_family_code").remedy(tree)
    assert remedy.state == "sound" and "is a CUDA 12 build" in remedy.detail


@pytest.mark.parametrize(
    ("codes", "least", "expected"),
    [
        (["100f"], 100, "defect"),
        (["120f"], 100, "sound"),
        (["100f"], 130, "sound"),
        (["120a"], 100, "defect"),
    ],
)
def test_qutlass_is_held_against_what_fp_quant_admits(
    codes: list[str], least: int, expected: str, tmp_path: Path
) -> None:
    qutlass = module({"fused_quantize_mx": codes, "fused_quantize_nv": codes})
    root = write_tree(tmp_path / "tree", {"_qutlass_C": qutlass})
    fp_quant = root / "vllm/model_executor/layers/quantization/fp_quant.py"
    fp_quant.parent.mkdir(parents=True)
    fp_quant.write_text(f"def get_min_capability(cls) -> int:\n    return {least}\n")
    assert state(open_tree(root), "n20_qutlass_sm12x")[0] == expected


@pytest.mark.parametrize(
    ("codes", "expected"), [(["80", "PTX 80"], "defect"), (["80", "90", "100", "120"], "sound")]
)
def test_flash_attention_with_code_for_every_target_would_be_sound(
    codes: list[str], expected: str, tmp_path: Path
) -> None:
    root = write_tree(tmp_path / "tree", {})
    (root / "vllm/vllm_flash_attn").mkdir()
    (root / "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so").write_bytes(module({"flash_fwd": codes}))
    assert state(open_tree(root), "n21_flash_attention_ptx")[0] == expected


@pytest.mark.parametrize(
    "name",
    ["s04_sm121_dispatch", "s05_cmake_arch_lists", "s06_scaled_mm_define", "s07_flashinfer_e2m1", "s10_e2m1_conversion",  # noqa: E501
     "s11_fp4_types", "s15_flashinfer_moe_targets", "s_integrate_gb10_sm121", "s_patch_cccl_fp4",
     "s_integrate_cuda_fp4_extension"],
)  # fmt: skip
def test_without_its_tool_a_probe_does_not_answer(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    tree = trees.pristine("0.32.0") if "flashinfer" in name else trees.source_tree("0.32.0")
    monkeypatch.syspath_prepend(tree)
    assert state(open_tree(tree), name)[0] == "not applicable"


@pytest.mark.parametrize(
    "name", ["s07_flashinfer_e2m1", "s10_e2m1_conversion", "s11_fp4_types", "s_patch_cccl_fp4"]
)
def test_an_nvcc_older_than_the_question_does_not_answer(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvcc").write_text(
        "#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n"
    )
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tree = trees.pristine("0.32.0") if "flashinfer" in name else trees.source_tree("0.32.0")
    monkeypatch.syspath_prepend(tree)
    assert state(open_tree(tree), name)[0] == "not applicable"


def test_a_pretended_gpu_leaves_no_folder_behind(tmp_path: Path) -> None:
    """Neither in a process that ends by itself nor in one that multiprocessing forked."""
    program = """
import multiprocessing
from probes.support import fake_cuda
def pretend(): fake_cuda.become(fake_cuda.SM120)
child = multiprocessing.get_context("fork").Process(target=pretend)
child.start(); child.join()
assert child.exitcode == 0
pretend()
"""
    environ = os.environ | {
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": f"{root()}{os.pathsep}{root() / 'patches'}",
    }
    environ |= {"VLLM_PLUGINS": "", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True)
    assert not list(tmp_path.glob("fake-cuda-*"))
