"""What is read out of compiled modules, and which builds a target is refused; on files made for
the purpose.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from nibble.engine.fatbin import Code, gpu_objects, needed_libraries
from nibble.engine.gpu_code import CORE, FAMILY_CODE, MOE, check_binaries, summary
from nibble.engine.patching.tree import open_tree
from nibble.errors import ExitCode, NibbleError
from nibble.machine.targets import load_target
from tests.support.paths import ROOT
from tests.support.releases.gpu_modules import module, write_tree

MARLIN = {"sm80_kernel_bfloat16_fe2m1f_bfloat16": ["PTX 80", "80"]}


def good(major: int, code: str) -> dict[str, dict[str, list[str]]]:
    """Modules in which every object that a family must have is built for `code`, beside a plain
    one and Marlin's PTX.
    """
    plain = code.rstrip("af")
    return {
        name: (
            MARLIN
            | {one: [code, "80"] for one in FAMILY_CODE[major].get(name, ())}
            | {"cache_kernels": [plain, "80"]}
        )
        for name in (CORE, MOE)
    }


def check(
    folder: Path, modules: dict[str, dict[str, list[str]]], target: str, **made: object
) -> None:
    """nibble's check on a wheel of these modules."""
    files = {name: module(objects, **made) for name, objects in modules.items()}  # type: ignore[arg-type]
    check_binaries(open_tree(write_tree(folder, files)), load_target(target))


@pytest.mark.parametrize(
    ("code", "runs", "fails"),
    [
        (Code(120), [(12, 0), (12, 1)], [(10, 0), (13, 0)]),
        (Code(121), [(12, 1)], [(12, 0)]),
        (Code(120, "a"), [(12, 0)], [(12, 1)]),
        (Code(121, "a"), [(12, 1)], [(12, 0)]),
        (Code(120, "f"), [(12, 0), (12, 1)], [(10, 0)]),
        (Code(121, "f"), [(12, 1)], [(12, 0)]),
        (Code(100, "f"), [(10, 0), (10, 3)], [(11, 0), (12, 0)]),
        (Code(90, "a"), [(9, 0)], [(10, 0)]),
        (Code(80, is_ptx=True), [(8, 0), (8, 9), (9, 0), (12, 1)], [(7, 5)]),
        (Code(120, "a", is_ptx=True), [(12, 0)], [(12, 1)]),
    ],
)
def test_which_gpus_load_a_code(
    code: Code, runs: list[tuple[int, int]], fails: list[tuple[int, int]]
) -> None:
    assert all(code.runs_on(capability) for capability in runs)
    assert not any(code.runs_on(capability) for capability in fails)


def test_objects_are_read_with_their_names_and_codes(tmp_path: Path) -> None:
    path = tmp_path / "module.so"
    path.write_bytes(
        module({"nvfp4_quant_kernels": ["120f", "100f"], "marlin": ["75", "PTX 80", "80"]})
    )
    first, second = gpu_objects(path)
    assert (first.name, first.codes) == ("nvfp4_quant_kernels", (Code(120, "f"), Code(100, "f")))
    assert (second.name, second.codes) == ("marlin", (Code(75), Code(80, is_ptx=True), Code(80)))
    assert needed_libraries(path) == ("libcudart.so.13",)


def test_a_stripped_module_has_codes_and_no_names(tmp_path: Path) -> None:
    path = tmp_path / "module.so"
    path.write_bytes(module({"marlin": ["80"]}, stripped=True))
    assert [(one.name, one.codes) for one in gpu_objects(path)] == [("", (Code(80),))]


def test_a_module_without_gpu_code_has_no_objects(tmp_path: Path) -> None:
    path = tmp_path / "module.so"
    path.write_bytes(module({}).replace(b".nv_fatbin", b".rodata.xx"))
    assert gpu_objects(path) == ()


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "entry", "missing"])
def test_what_is_no_module_is_one_clear_error(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "module.so"
    whole = module({"marlin": ["80"]})
    content = {
        "empty": b"",
        "text": b"#!/bin/sh\n",
        "cut": whole[:-100],
        "entry": whole.replace(b"\2\0\1\1", b"\7\0\1\1"),
    }
    if damage != "missing":
        path.write_bytes(content[damage])
    with pytest.raises(
        NibbleError, match=r"module\.so cannot be read: .*install vLLM again"
    ) as refusal:
        gpu_objects(path)
    assert refusal.value.code == ExitCode.VERIFY


def test_no_damage_is_anything_but_that_error(tmp_path: Path) -> None:
    path, chance = tmp_path / "module.so", random.Random(3)
    whole = module({"marlin": ["80", "PTX 80"], "quant": ["120f"]})
    refused = 0
    for _ in range(300):
        data = bytearray(
            whole[: chance.randrange(64, len(whole))] if chance.random() < 0.2 else whole
        )
        for _ in range(4):
            data[chance.randrange(6, len(data))] = chance.choice((0, 1, 2, 127, 255))
        path.write_bytes(data)
        for read in (gpu_objects, needed_libraries):
            try:
                read(path)
            except NibbleError:
                refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("target", "major", "code"),
    [("gb10", 12, "120f"), ("gb10", 12, "121a"), ("gb10", 12, "121f"), ("sm120", 12, "120f"), ("sm120", 12, "120a"),  # noqa: E501
     ("b200", 10, "100f"), ("hopper", 9, "90a")],
)  # fmt: skip
@pytest.mark.parametrize("stripped", [False, True])
def test_a_build_for_the_target_passes(
    target: str, major: int, code: str, stripped: bool, tmp_path: Path
) -> None:
    modules = good(major, code)
    if code == "121a":
        modules[CORE]["cache_kernels"] = ["121"]
    check(tmp_path, modules, target, stripped=stripped)


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        (["120f"], ""),
        (["121a"], ""),
        (["120"], r"nibble_kernels/_cuda\.abi3\.so has w4a4 for 120; expected 120f or 121a"),
        (["90a", "80"], r"has w4a4 for 80, 90a; .*; build them with \./build\.sh gb10 --kernels"),
    ],
)
def test_nibbles_kernels_must_have_code_of_the_targets_family(
    codes: list[str], said: str, tmp_path: Path
) -> None:
    files = {name: module(objects) for name, objects in good(12, "120f").items()}
    tree = open_tree(write_tree(tmp_path, files))
    (tmp_path / "nibble_kernels").mkdir()
    own = tmp_path / "nibble_kernels/_cuda.abi3.so"
    own.write_bytes(module({"decode": ["120f"], "w4a4": codes}))
    assert summary(tree)[-1].startswith("nibble_kernels/_cuda.abi3.so: CUDA 13; of 2 objects")
    if not said:
        return check_binaries(tree, load_target("gb10"))
    with pytest.raises(NibbleError, match=said) as refusal:
        check_binaries(tree, load_target("gb10"))
    assert refusal.value.code == ExitCode.VERIFY


@pytest.mark.parametrize(
    ("target", "major", "code", "said"),
    [
        (
            "gb10",
            12,
            "120",
            (
                r"nvfp4_quant_kernels for 80, 120 \(and 10 more objects that lack it\); expected"
                r" 120f or 121a"
            ),
        ),
        ("gb10", 12, "121", r"nvfp4_quant_kernels for 80, 121 .*; expected 120f or 121a"),
        ("gb10", 12, "120a", r"nvfp4_quant_kernels for 80, 120a .*; expected 120f or 121a"),
        ("sm120", 12, "121a", r"nvfp4_quant_kernels for 80, 121a .*; expected 120f or 120a"),
        (
            "b200",
            10,
            "100a",
            r"nvfp4_quant_kernels for 80, 100a .*; expected 100f",
        ),  # B300 is a b200 too
        ("hopper", 9, "90", r"scaled_mm_c3x_sm90 for 80, 90 .*; expected 90a"),
    ],
)
def test_a_build_that_the_target_cannot_load_is_refused(
    target: str, major: int, code: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(
        NibbleError, match=rf"^{target} cannot use .*_C_stable_libtorch\.abi3\.so has {said}"
    ) as refusal:
        check(tmp_path, good(major, code), target)
    assert refusal.value.code == ExitCode.VERIFY
    assert "\n" not in refusal.value.line()
    assert (
        f"TORCH_CUDA_ARCH_LIST={load_target(target).torch_cuda_arch_list}" in refusal.value.line()
    )


@pytest.mark.parametrize("module_name", [CORE, MOE])
@pytest.mark.parametrize("code", ["120", "120a"])
def test_one_wrong_object_of_either_module_is_found(
    module_name: str, code: str, tmp_path: Path
) -> None:
    modules = good(12, "120f")
    name = FAMILY_CODE[12][module_name][-1]
    modules[module_name][name] = [code]
    with pytest.raises(
        NibbleError, match=rf"{module_name}\.abi3\.so has {name} for {code}; expected"
    ):
        check(tmp_path, modules, "gb10")


def test_a_missing_object_is_named(tmp_path: Path) -> None:
    modules = good(12, "120f")
    del modules[CORE]["nvfp4_scaled_mm_sm120_kernels"]
    with pytest.raises(
        NibbleError, match="has no nvfp4_scaled_mm_sm120_kernels; expected 120f or 121a"
    ):
        check(tmp_path, modules, "gb10")


def test_an_object_that_is_not_on_the_list_must_be_loadable_too(tmp_path: Path) -> None:
    modules = good(12, "120f")
    modules[CORE]["moe_data"] = ["90a", "120a"]
    with pytest.raises(
        NibbleError, match=r"has moe_data for 90a, 120a; expected code that 12\.1 loads"
    ):
        check(tmp_path, modules, "gb10")


def test_a_stripped_module_without_family_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        NibbleError, match=r"has code for .*120.* \(and no symbol table\); expected 120f or 121a"
    ):
        check(tmp_path, good(12, "120"), "gb10", stripped=True)


def test_a_cuda_12_build_is_refused_whatever_its_code(tmp_path: Path) -> None:
    with pytest.raises(
        NibbleError, match=r"is a CUDA 12 build \(libcudart\.so\.12\); expected libcudart\.so\.13"
    ):
        check(tmp_path, good(12, "120f"), "gb10", needed=("libc.so.6", "libcudart.so.12"))


@pytest.mark.parametrize("lost", [CORE, MOE])
def test_a_missing_module_is_refused(lost: str, tmp_path: Path) -> None:
    modules = good(12, "120f")
    del modules[lost]
    with pytest.raises(
        NibbleError, match=rf"has no vllm/{lost}\.abi3\.so; expected a CUDA build of vLLM"
    ):
        check(tmp_path, modules, "gb10")


def test_the_cpu_target_needs_no_gpu_code(tmp_path: Path) -> None:
    check(tmp_path, {}, "cpu")


def test_the_summary_is_one_line_a_module(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path, {"_C": module({"a": ["120f", "80"], "b": ["80"]}), "none": module({})}
    )
    assert summary(open_tree(root)) == ["vllm/_C.abi3.so: CUDA 13; of 2 objects 80 in 2, 120f in 1"]


def test_a_call_without_its_words_gets_the_usage() -> None:
    command = [sys.executable, "-m", "nibble.engine.gpu_code", "gb10"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.USAGE
    assert done.stderr == "usage: python -m nibble.engine.gpu_code ROOT TARGET\n"
