"""The GPU code of real wheels and of what nvcc makes is read right, and a build for the wrong
target is refused.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import elftools
import pytest

from nibble.engine.fatbin import Code, gpu_objects
from nibble.engine.gpu_code import CORE, check_binaries
from nibble.engine.patching.tree import open_tree
from nibble.errors import NibbleError
from nibble.machine.paths import root
from nibble.machine.targets import load_target
from tests.support.changes import PATCHING
from tests.support.releases import cuda_tools
from tests.support.releases.trees import pristine

needs_nvcc = pytest.mark.skipif(not cuda_tools.NVCC.exists(), reason=f"no {cuda_tools.NVCC}")

# How many objects of each module have which code; counted with cuobjdump 13.5 too (below) and by
# patches.md's own scan.
CONTENT: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "0.15.1": {
        "_C": {"120": 35, "120a": 16, "100a": 17},
        "_moe_C": {"120": 11, "PTX 80": 15},
        "vllm_flash_attn/_vllm_fa2_C": {"80": 60, "PTX 80": 60},
    },
    "0.16.0": {
        "_C": {"120": 35, "120a": 16, "100a": 17},
        "_moe_C": {"120": 11, "PTX 80": 15},
        "vllm_flash_attn/_vllm_fa2_C": {"80": 60, "PTX 80": 60},
    },
    "0.32.0": {
        "_C_stable_libtorch": {"120": 47, "120f": 35, "100f": 23},
        "_moe_C_stable_libtorch": {"120": 7, "120f": 19, "PTX 80": 15},
        "_qutlass_C": {"100f": 6},
        "_flashmla_C": {"90a": 51, "100f": 51},
        "_flashkda_C": {"90a": 1, "100f": 1, "120f": 1},
        "vllm_flash_attn/_vllm_fa2_C": {"80": 76, "PTX 80": 76},
        "vllm_flash_attn/_vllm_fa3_C": {"90a": 192},
    },
}


def path_of(version: str, module: str) -> Path:
    return pristine(version) / f"vllm/{module}.abi3.so"


@pytest.mark.when_changed(*PATCHING)
@pytest.mark.parametrize(
    ("version", "module"), [(version, name) for version in CONTENT for name in CONTENT[version]]
)
def test_wheels_hold_what_is_written_about_them(version: str, module: str) -> None:
    found = Counter(
        str(code) for one in gpu_objects(path_of(version, module)) for code in one.codes
    )
    assert {code: found[code] for code in CONTENT[version][module]} == CONTENT[version][module]
    assert not any(code.startswith("121") for code in found)


@pytest.mark.when_changed(*PATCHING)
def test_every_object_of_the_wheels_has_the_name_of_its_source() -> None:
    objects = {one.name: one.codes for one in gpu_objects(path_of("0.32.0", CORE))}
    # Two sources are named activation_kernels.cu
    assert len(objects) == len(gpu_objects(path_of("0.32.0", CORE))) - 1
    assert objects["nvfp4_scaled_mm_sm120_kernels"] == (Code(120, "f"),)
    assert objects["marlin"] == (Code(75), Code(80, is_ptx=True), Code(80))
    older = {one.name: one.codes for one in gpu_objects(path_of("0.16.0", "_C"))}
    assert older["nvfp4_scaled_mm_sm120_kernels"] == (Code(120, "a"),)


@pytest.mark.when_changed(*PATCHING)
@pytest.mark.parametrize("module", ["_C_stable_libtorch", "_qutlass_C"])
def test_nvidias_tool_lists_the_same_machine_code(module: str) -> None:
    tools = cuda_tools.disassembler()
    told = subprocess.run(
        [tools / "cuobjdump", "-lelf", path_of("0.32.0", module)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    listed = Counter(re.findall(r"\.sm_(\w+)\.cubin", told))
    codes = [
        code
        for one in gpu_objects(path_of("0.32.0", module))
        for code in one.codes
        if not code.is_ptx
    ]
    assert listed == Counter(str(code).rstrip("f") for code in codes)  # it does not list the f


@pytest.mark.when_changed(*PATCHING)
def test_the_released_wheel_has_the_instructions_of_gb10(tmp_path: Path) -> None:
    """Each object by its name, taken out by NVIDIA's tool, which numbers machine code in the
    order of the file.
    """
    codes = [
        (one.name, code)
        for one in gpu_objects(path_of("0.32.0", CORE))
        for code in one.codes
        if not code.is_ptx
    ]
    words = [cuda_tools.disassembler() / "cuobjdump", "-xelf", "sm_120", path_of("0.32.0", CORE)]
    subprocess.run(words, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    found = {
        name: cuda_tools.gb10_instructions(tmp_path / f"{CORE}.abi3.{number}.sm_120.cubin")
        for number, (name, code) in enumerate(codes, 1)
        if name in cuda_tools.GB10_INSTRUCTIONS and code == Code(120, "f")
    }
    assert found == cuda_tools.GB10_INSTRUCTIONS


@pytest.mark.when_changed(*PATCHING)
@needs_nvcc
@pytest.mark.parametrize(
    "told", [["120", "80", "PTX 80"], ["120a"], ["120f"], ["121a"], ["PTX 100f"]], ids=str
)
def test_flags_mean_what_nvcc_was_told(told: list[str], tmp_path: Path) -> None:
    """The layout of a fat binary is documented nowhere."""
    source, output = tmp_path / "some_kernel.cu", tmp_path / "object.o"
    source.write_text("__global__ void some_kernel() {}\n")
    flags = []
    for one in told:
        number = one.removeprefix("PTX ")
        flags.append(
            f"-gencode=arch=compute_{number},code={'compute' if one.startswith('PTX') else 'sm'}_{number}"  # noqa: E501
        )
    subprocess.run([cuda_tools.NVCC, "-c", *flags, "-o", output, source], check=True)
    (one,) = gpu_objects(output)
    assert one.name == "some_kernel"
    assert sorted(map(str, one.codes)) == sorted(told)


@pytest.mark.parametrize("target", ["gb10", "sm120", "b200", "hopper"])
def test_the_pinned_wheel_passes_for_every_target_in_seconds(target: str) -> None:
    tree, chosen = open_tree(pristine("0.32.0")), load_target(target)
    check_binaries(tree, chosen)  # reads the files: a cold cache costs processor time, too
    began = time.process_time()
    check_binaries(tree, chosen)
    assert time.process_time() - began < 5


@pytest.mark.when_changed(*PATCHING)
@pytest.mark.parametrize("version", ["0.15.1", "0.16.0"])
def test_the_seeds_wheels_are_refused(version: str) -> None:
    with pytest.raises(
        NibbleError,
        match=r"gb10 cannot use this vLLM: vllm/_C\.abi3\.so of vLLM .* is a CUDA 12 build",
    ):
        check_binaries(open_tree(pristine(version)), load_target("gb10"))


@pytest.mark.when_changed(*PATCHING)
@pytest.mark.parametrize(
    ("flag", "said"),
    [
        (0x100000, r"nvfp4_quant_kernels for 100f, 120a \("),
        (0, r"nvfp4_quant_kernels for 100f, 120 \("),
    ],
    ids=["120a, as a CUDA 12 build", "plain 120, as images for GB10 had it"],
)
def test_the_real_wheel_with_other_targets_is_refused(flag: int, said: str, tmp_path: Path) -> None:
    """The 0.32.0 wheel whose 120f entries say that they are for something else."""
    tree = tmp_path / "tree"
    (tree / "vllm").mkdir(parents=True)
    (tree / "vllm-0.32.0.dist-info").mkdir()
    (tree / "vllm/__init__.py").touch()
    for path in pristine("0.32.0").glob("vllm/*.so"):
        (tree / "vllm" / path.name).symlink_to(path)
    changed = tree / f"vllm/{CORE}.abi3.so"
    changed.unlink()
    changed.write_bytes(with_flag(path_of("0.32.0", CORE).read_bytes(), flag))
    with pytest.raises(NibbleError, match=rf"{CORE}\.abi3\.so has {said}"):
        check_binaries(open_tree(tree), load_target("gb10"))


def with_flag(data: bytes, flag: int) -> bytes:
    """A module whose family-specific entries for SM120 have another flag."""
    changed, count = bytearray(data), 0
    header = struct.pack("<HH", 2, 0x101)
    position = data.find(header)
    while position >= 0:
        (sm,), (flags,) = (
            struct.unpack_from("<I", data, position + 28),
            struct.unpack_from("<Q", data, position + 40),
        )
        if sm == 120 and flags & 0x300000 == 0x200000:
            struct.pack_into("<Q", changed, position + 40, flags & ~0x300000 | flag)
            count += 1
        position = data.find(header, position + 4)
    assert count == CONTENT["0.32.0"][CORE]["120f"]
    return bytes(changed)


@pytest.mark.when_changed(*PATCHING)
@pytest.mark.parametrize(
    ("version", "target", "status"), [("0.32.0", "gb10", 0), ("0.16.0", "gb10", 6)]
)
def test_the_build_asks_with_the_standard_library_and_pyelftools_alone(
    version: str, target: str, status: int, tmp_path: Path
) -> None:
    words = [sys.executable, "-S", "-m", "nibble.engine.gpu_code", str(pristine(version)), target]
    (tmp_path / "elftools").symlink_to(Path(elftools.__file__).parent)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        words, cwd=root(), env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    assert all(line.startswith("vllm/") for line in done.stdout.splitlines())
    assert len(done.stdout.splitlines()) >= 5
    assert done.stderr.count("\n") == (1 if status else 0)
