"""The same sources compile for every target, and on those that convert FP4 in hardware the
kernels do. Nothing runs.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

from benchmarks import issue_model
from tests.support.changes import OPERATORS
from tests.support.kernels.kernel_build import KERNELS
from tests.support.kernels.shared_reads import loads_on_their_way
from tests.support.releases.cuda_tools import NVCC, disassembler

PACKAGE, HERE = KERNELS / "src/nibble_kernels", Path(__file__).parent
# They call the kernels of other sources.
WITHOUT_KERNELS = ("nvfp4_linear/norm_linear.cu", "nvfp4_linear/weight_linear.cu")
SOURCES = sorted(
    source
    for source in (str(path.relative_to(PACKAGE)) for path in PACKAGE.glob("**/*.cu"))
    if source not in WITHOUT_KERNELS
)
FAST = [
    ("120f", "activation_quant/kernel.cu"),
    ("90a", "conversions/probe.cu"),
    ("120f", "conversions/probe.cu"),
]
WITH_STAGES = [  # that bulk copies fill again and again
    ("90a", "nvfp4_moe/grouped.cu"),
    *(
        (arch, f"{kind}/w4a4.cu")
        for arch in ("90a", "120f")
        for kind in ("nvfp4_linear", "nvfp4_moe")
    ),
    *(("90a", f"decode_attention/{form}/bf16.cu") for form in ("clusters", "warpgroups")),
]
ALL = [(arch, source) for arch in ("90a", "100f", "120f", "121a") for source in SOURCES]
WITHOUT_FP4 = {"90a"}
PTX_2_TO_THE_23 = "0f4B0000"  # 8388608.0 and the constants near it: the software conversion's shift
SASS_2_TO_THE_23 = re.compile(r"\b83886\d\d\b")

Compiler = Callable[[str, str], tuple[str, Path]]

pytestmark = [
    pytest.mark.skipif(not (NVCC.exists() or shutil.which("nvcc")), reason="no nvcc here"),
    pytest.mark.when_changed(*OPERATORS),
]


def slow_except(fast: list[tuple[str, str]]) -> list[Any]:
    """ALL as parameters."""
    return [
        pytest.param(*one, marks=() if one in fast else pytest.mark.slow, id="-".join(one))
        for one in ALL
    ]


@pytest.fixture(scope="module")
def compile_for(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    """compile_for(arch, source): PTX and machine code; each is compiled once."""

    @cache
    def compiled(arch: str, source: str) -> tuple[str, Path]:
        return compile_source(arch, source, tmp_path_factory.mktemp("nvcc"))

    return compiled


def compile_source(arch: str, source: str, folder: Path) -> tuple[str, Path]:
    """PTX and machine code of one source, with the flags that the wheel is built with."""
    setup = (KERNELS / "setup.py").read_text()
    flags = re.search(r"^NVCC_FLAGS = (\[.*?\])$", setup, re.MULTILINE | re.DOTALL)
    assert flags
    torch_headers = Path(torch.__file__).parent / "include"
    cubin = folder / "kernel.cubin"
    words = [
        str(NVCC) if NVCC.exists() else "nvcc",
        *COMMON_NVCC_FLAGS,
        *ast.literal_eval(flags[1]),
        "-cubin",
        "-keep",
        "-keep-dir",
        str(folder),
    ]
    words += [
        f"-gencode=arch=compute_{arch},code=sm_{arch}",
        "-DTORCH_TARGET_VERSION=0x020B000000000000ULL",
    ]
    words += [
        f"-I{PACKAGE / 'include'}",
        f"-I{PACKAGE}",
        "-isystem",
        str(torch_headers),
        "-o",
        str(cubin),
        str(PACKAGE / source if (PACKAGE / source).exists() else HERE / source),
    ]
    subprocess.run(words, check=True, cwd=folder)
    return next(folder.glob("*.ptx")).read_text(), cubin


def ptx_functions(ptx: str) -> Iterator[tuple[str, str]]:
    """Names and bodies of kernels."""
    for function in re.split(r"^\.visible \.entry ", ptx, flags=re.MULTILINE)[1:]:
        yield function.partition("(")[0], function


def sass_functions(cubin: Path) -> Iterator[tuple[str, str]]:
    tool = disassembler()
    listing = subprocess.run(
        [tool / "cuobjdump", "-sass", cubin],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": str(tool)},
    ).stdout
    for function in listing.split("Function : ")[1:]:
        yield function.partition("\n")[0], function


@pytest.mark.parametrize(("arch", "source"), slow_except(FAST))
def test_kernels_convert_with_the_targets_instructions(
    arch: str, source: str, compile_for: Compiler
) -> None:
    ptx, cubin = compile_for(arch, source)
    has_fp4 = arch not in WITHOUT_FP4
    for name, body in ptx_functions(ptx):
        encodes = "cvt.rn.satfinite.e2m1x2.f32" in body
        software = PTX_2_TO_THE_23 in body
        if "12Instructions" in name and ("quantize" in name or "encode_e2m1" in name):
            assert (encodes, software) == (has_fp4, not has_fp4), name
        elif "8Software" in name:
            assert not encodes, name
    opcodes = {
        name: Counter(re.findall(r"\bF2FP\.[A-Z0-9_.]*", body))
        for name, body in sass_functions(cubin)
    }
    used = sum(
        count
        for names in opcodes.values()
        for opcode, count in names.items()
        if "SATFINITE.E2M1" in opcode
    )
    assert bool(used) == (has_fp4 and ("E2M1" in ptx or "satfinite.e2m1x2" in ptx))


@pytest.mark.parametrize(("arch", "source"), slow_except(WITH_STAGES))
def test_no_load_is_on_its_way_when_its_shared_memory_is_given_back(
    arch: str, source: str, compile_for: Compiler
) -> None:
    """The bulk copy that the arrival lets go would overtake it."""
    _, cubin = compile_for(arch, source)
    found = {name: loads_on_their_way(body) for name, body in sass_functions(cubin)}
    assert not {name: loads for name, loads in found.items() if loads}


def test_a_load_that_nothing_waits_for_is_found() -> None:
    """In the loop of nvfp4_moe_linear's form of 16 tokens, as it once was: the product comes after
    the arrival. With the product first, nothing is found.
    """
    load = (
        "/*1120*/ LDS.128 R40, [R60+0x3200] ;  /* 0x003200003c287984 */\n /* 0x000e620000000c00 */"
    )
    arrival = (
        "/*12b0*/ @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R13+URZ+0x1a0c0], RZ ;"
        " /* 0x01a0c0ff0dff89a7 */\n /* 0x0007e6000810003f */"
    )
    product = (
        "/*12f0*/ HMMA.16816.F32.BF16 R20, R28, R40, R20 ; /* 0x000000281c14723c */\n"
        " /* 0x002fe20000041814 */"
    )
    assert len(loads_on_their_way("\n".join((load, arrival, product)))) == 1
    assert not loads_on_their_way("\n".join((load, product, arrival)))
    other = load.replace("0x000e620000000c00", "0x000ea20000000c00")  # another counter
    assert len(loads_on_their_way("\n".join((other, product, arrival)))) == 1


@pytest.mark.parametrize(
    "arch",
    [
        "120f",
        pytest.param("121a", marks=pytest.mark.slow),
        pytest.param("100f", marks=pytest.mark.slow),
    ],
)
def test_a_thread_of_nvfp4_quant_converts_32_elements_in_16_instructions(
    arch: str, compile_for: Compiler
) -> None:
    """And none of the software conversion's constants are in those kernels."""
    _, cubin = compile_for(arch, "activation_quant/kernel.cu")
    checked = 0
    for name, body in sass_functions(cubin):
        if "5Plain" in name and "12Instructions" in name:
            assert len(re.findall(r"F2FP\.SATFINITE\.E2M1\.F32\.PACK_AB_MERGE_C", body)) == 16, name
            assert not SASS_2_TO_THE_23.search(body), name
            checked += 1
    assert checked == 8  # two types, two layouts, exact and approximate


@pytest.mark.parametrize(
    "arch",
    ["120f", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("90a", "100f", "121a"))],
)
@pytest.mark.parametrize(
    ("source", "count"), [("nvfp4_linear", 11), ("nvfp4_moe", 8), ("e4m3_linear", 3)]
)
def test_the_decode_kernels_are_compiled_to_what_they_count_on(
    arch: str, source: str, count: int, compile_for: Compiler
) -> None:
    """Nothing spilled but by experts on SM100, tensor cores and overlapped launches in every form,
    codes converted as the target can.

    Half of the kernels are empty: forms for another size of shared memory.
    """
    _, cubin = compile_for(arch, f"{source}/decode.cu")
    tool = disassembler()
    words = [tool / "cuobjdump", "-res-usage", cubin]
    usage = subprocess.run(
        words, capture_output=True, text=True, check=True, env={"PATH": str(tool)}
    ).stdout
    spilled = re.findall(r"STACK:(\d+)", usage)
    assert len(spilled) == len(re.findall(r"REG:(\d+)", usage)) == 2 * count
    may_spill = (arch, source) == ("100f", "nvfp4_moe")
    assert max(map(int, spilled)) <= (168 if may_spill else 0)
    launched = f"FormILb{int(arch.startswith('12'))}E"
    unpack = "E2M1" if arch not in WITHOUT_FP4 else "E4M3"
    for name, body in sass_functions(cubin):
        if launched not in name:
            assert "HMMA" not in body, name
            continue
        form = re.search(r"FormILb\dELj(\d)E", name)  # groups of tokens
        assert form and len(re.findall(r"\bHMMA\.16816\.F32", body)) == 8 * int(form[1]), name
        assert may_spill or "LDL" not in body, name
        assert "LDGSTS" in body and "ACQBULK" in body and "PREEXIT" in body, name
        assert ("E4m3Operand" in name) == bool(re.search("E4m3(Rows)?E", name)), name
        if "11HalfOperand" in name:
            assert len(re.findall(rf"F2FP\.F16\.{unpack}\.UNPACK_B", body)) >= 32, name


@pytest.mark.parametrize(
    "arch",
    ["120f", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("90a", "100f", "121a"))],
)
def test_the_warpgroup_kernel_is_compiled_for_sm90_alone(arch: str, compile_for: Compiler) -> None:
    """Four pieces of a tile, two products of each and strip. Three warpgroups may spill outside
    the loop, and so may four with one more for a norm. x comes through registers where a form
    orders it.
    """
    _, cubin = compile_for(arch, "nvfp4_linear/warpgroup.cu")
    resources = resources_of(cubin)
    (units, clusters, ranges), (none, before, after) = "012", "012"  # Sharing and Norm
    seen = set[tuple[str, ...]]()
    for name, body in sass_functions(cubin):
        form = re.search(
            r"(Bfloat|Half)OperandE.*FormILj(\d+)ELj(\d)ELj(\d)E"
            r".*SharingE(\d)ELb(\d)E.*NormE(\d)E",
            name,
        )
        if not form:
            assert "order_x" in name and "HGMMA" not in body
            continue
        seen.add(form.groups())
        _, tokens, warpgroups, strips, sharing, orders_x, norm = form.groups()
        products = [found.start() for found in re.finditer(r"\bHGMMA\.64x", body)]
        assert len(products) == (8 * int(strips) if arch == "90a" else 0), name
        if not products:
            assert resources[name]["STACK"] == 0
            continue
        if warpgroups == "3":
            most = {("128", "1"): 8, ("128", "2"): 48, ("64", "2"): 96 if norm == after else 40}
            spilled = most.get((tokens, sharing), 0)
        else:
            spilled = 8 if norm == before else 0
        assert resources[name]["STACK"] <= spilled, name
        assert not re.search(r"\b(LDL|STL)\b", body[products[0] : products[-1]]), name
        for instruction in ("UTMALDG", "ACQBULK", "PREEXIT"):
            assert instruction in body, (name, instruction)
        assert ("UBLKCP" in body) != (orders_x == "1"), name
    forms = {(tokens, warpgroups, "1") for tokens in ("16", "32") for warpgroups in ("3", "4")}
    forms |= {("64", "3", "1"), ("128", "2", "1"), ("128", "3", "1")}
    beside = {(*form, norm) for form in forms for norm in (none, before, after)}
    beside -= {one for one in beside if one[0] == "128" and one[-1] != none}
    shared = {
        (*form, sharing, "0", norm)
        for *form, norm in beside
        for sharing in (units, clusters, ranges)
    }
    shared |= {("128", "2", "2", sharing, "0", none) for sharing in (units, ranges)}
    shared |= {
        ("32", "4", "1", sharing, "1", norm)
        for sharing in (units, clusters)
        for norm in (none, after)
    }
    expected = {("Bfloat", *one) for one in shared}
    expected |= {("Half", *one) for one in shared if one[-1] == none}  # float16 could overflow
    assert seen >= expected
    assert not {one for one in seen if one[0] == "Half" and one[-1] != none}


OMMA, SPARSE_OMMA = (
    "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X",
    "OMMA.SF.SP.168128.F32.E2M1.E2M1.UE4M3.4X",
)
SM12X_AND_ONE_SLOW = ["120f", "121a", pytest.param("90a", marks=pytest.mark.slow)]


@cache
def products_of(cubin: Path) -> dict[str, Counter[str]]:
    """Tensor core instructions of each kernel."""
    return {
        name: Counter(re.findall(r"\b[HOQ]MMA\.[A-Z0-9.]+", body))
        for name, body in sass_functions(cubin)
    }


def resources_of(cubin: Path) -> dict[str, dict[str, int]]:
    """Kernel -> what it takes by the assembler's own account: REG, STACK, SHARED (static) ..."""
    tool = disassembler()
    usage = subprocess.run(
        [tool / "cuobjdump", "-res-usage", cubin],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": str(tool)},
    ).stdout
    found = re.findall(r"Function (\S+):\n(.*)", usage)
    return {name: {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", line)} for name, line in found}


def assert_nothing_spilled(cubin: Path, kernels: int) -> None:
    resources = resources_of(cubin)
    assert [found["STACK"] for found in resources.values()] == [0] * kernels
    assert not any(re.search(r"\b(LDL|STL)\b", body) for _, body in sass_functions(cubin))


# Decode attention by clusters of blocks, and by warpgroups.
CLUSTERS, WARPGROUPS = "9attention8clusters", "9attention10warpgroups"


def attention_form(name: str) -> tuple[int, bool, int, bool]:
    """Head dim, whether keys are FP8, eights of rows, whether it is for 99 KB of shared memory."""
    form = re.search(r"FormILj(\d+)ELb(\d)ELj(\d)(?:ELb(\d))?E", name)  # others: without the last
    assert form, name
    return int(form[1]), form[2] == "1", int(form[3]), form[4] == "1"


def most_stack(arch: str, name: str) -> int:
    """Bytes that a form of decode attention may spill.

    With head dim 256 and more than 8 rows, sums and queries take 192 of 255 registers. A tile's
    loop then has at most 10 accesses to the stack in 1900 instructions. On SM100 two blocks share
    the registers with FP8 keys of 128; what it spills is not in that loop. So do blocks of clusters
    with BF16 keys of 128, whose loop has up to 4 accesses. Warpgroups have 168 registers with head
    dim 256, too few for FP8 keys and values of more than 8 rows.
    """
    dim, is_fp8, groups, _ = attention_form(name)
    if CLUSTERS in name:
        return 0 if is_fp8 or dim == 64 else 8
    if WARPGROUPS in name:
        return 32 if (dim, is_fp8, groups) == (256, True, 2) else 0
    if dim == 256 and groups == 2:
        return 80
    return 8 if (arch, dim, is_fp8, groups) == ("100f", 128, True, 1) else 0


# Images have 120f; 121a is what an instruction of GB10 alone would need.
PRODUCTS = re.compile(r"/(decode|w4a4)\.cu|(fp8_linear|nvfp4_sparse)/")


def spill_cases() -> Iterator[Any]:
    for arch in ("100f", "120f", "121a"):
        for source in SOURCES:
            if arch == "100f" and "w4a4" in source:
                continue  # emulated there, for tests
            is_quick = arch == "120f" or (arch == "121a" and PRODUCTS.search(source))
            is_quick = is_quick and "decode_attention" not in source
            yield pytest.param(arch, source, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(("arch", "source"), [*spill_cases()])
def test_no_kernel_spills_or_takes_more_shared_memory_than_blackwell_has(
    arch: str, source: str, compile_for: Compiler
) -> None:
    """99 KB a block on SM12x. What launches add to it is asserted where forms are: work.cuh,
    w4a4.cuh and decode_attention/launch.cuh. Some forms of attention may spill: most_stack().
    """
    _, cubin = compile_for(arch, source)
    resources = resources_of(cubin)
    if "decode_attention" in source:
        for name, found in resources.items():
            assert found["STACK"] <= most_stack(arch, name), name
    else:
        assert_nothing_spilled(cubin, len(resources))
    assert resources and max(found["SHARED"] for found in resources.values()) <= 99 * 1024


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(
            loop, marks=pytest.mark.slow if "attention" in loop.source else (), id=loop.kernel
        )
        for loop in issue_model.LOOPS
    ],
)
def test_every_loop_issues_faster_than_its_bytes_are_read(
    loop: issue_model.Loop, compile_for: Compiler
) -> None:
    """By 1.3 on a GB10 and an RTX PRO 6000: the prediction of docs/kernels/blackwell.md."""
    kernels = dict(sass_functions(compile_for("120f", loop.source)[1]))
    found = issue_model.instructions(issue_model.body_of(loop, kernels), loop.opcode)
    for gpu in issue_model.GPUS:
        assert issue_model.margin(loop, gpu, *found) >= issue_model.NEEDED, gpu.name


@pytest.mark.parametrize("arch", ["90a", "100f", "120f", "121a"])
def test_fp4_products_are_instructions_where_the_target_has_them(
    arch: str, compile_for: Compiler
) -> None:
    """Elsewhere four products of f16 stand for a dense one, eight for a sparse one."""
    _, cubin = compile_for(arch, "fp4_products.cu")
    found = {"sparse" in name: products for name, products in products_of(cubin).items()}
    dense = {OMMA: 1} if arch.startswith("12") else {"HMMA.16816.F32": 4}
    assert found[False] == dense
    assert found[True] == ({SPARSE_OMMA: 1} if arch == "121a" else {"HMMA.16816.F32": 8})


W4A4 = [  # sources, kernels, and how many of them multiply
    ("nvfp4_linear/w4a4.cu", 7, 6),
    ("nvfp4_moe/w4a4.cu", 14, 4),
]


def w4a4_tokens(name: str) -> int:
    """Tokens of a tile of a W4A4 kernel that multiplies, else 0."""
    form = re.search(r"8multiplyI.*FormILj(\d+)E", name)
    return int(form[1]) if form else 0


@pytest.mark.parametrize("arch", ["120f", "121a"])
@pytest.mark.parametrize(("source", "count", "multiplying"), W4A4)
def test_the_w4a4_kernels_are_compiled_to_what_they_count_on(
    arch: str, source: str, count: int, multiplying: int, compile_for: Compiler
) -> None:
    """Two products for each 8 tokens, bulk copies, no spills; the shared memory is asserted in
    w4a4.cuh. All begin while the kernel before them ends.
    """
    _, cubin = compile_for(arch, source)
    assert_nothing_spilled(cubin, count)
    found = [name for name in products_of(cubin) if w4a4_tokens(name)]
    assert len(found) == multiplying
    for name, body in sass_functions(cubin):
        if tokens := w4a4_tokens(name):
            assert products_of(cubin)[name] == {OMMA: tokens // 4}, name
            assert "UBLKCP" in body and "SYNCS.PHASECHK" in body, name
        else:
            assert not products_of(cubin)[name], name
        assert "ACQBULK" in body and "PREEXIT" in body, name


@pytest.mark.slow
@pytest.mark.parametrize("source", [source for source, *_ in W4A4])
def test_the_emulated_w4a4_kernels_multiply_in_f16(source: str, compile_for: Compiler) -> None:
    _, cubin = compile_for("90a", source)
    for name, products in products_of(cubin).items():
        tokens = w4a4_tokens(name)
        assert products == ({"HMMA.16816.F32": tokens} if tokens else {}), name


@pytest.mark.parametrize("arch", SM12X_AND_ONE_SLOW)
def test_the_fp8_kernel_is_compiled_to_what_it_counts_on(arch: str, compile_for: Compiler) -> None:
    """E4M3 products on SM12x; two of f16 for each elsewhere."""
    _, cubin = compile_for(arch, "fp8_linear/kernel.cu")
    assert_nothing_spilled(cubin, 12)
    for name, products in products_of(cubin).items():
        groups = re.search(r"Lj(\d)ELb", name)
        assert groups
        count = 8 * int(groups[1])
        sm12x = {"QMMA.16832.F32.E4M3.E4M3": count}
        assert products == ({"HMMA.16816.F32": 2 * count} if arch == "90a" else sm12x), name


@pytest.mark.parametrize("arch", SM12X_AND_ONE_SLOW)
def test_the_sparse_kernel_is_compiled_to_what_it_counts_on(
    arch: str, compile_for: Compiler
) -> None:
    _, cubin = compile_for(arch, "nvfp4_sparse/kernel.cu")
    assert_nothing_spilled(cubin, 4)
    for name, body in sass_functions(cubin):
        groups, half = re.search(r"Lj(\d)E", name), "11HalfOperand" in name
        assert groups
        opcode = "HMMA.SP.16832.F32" + ("" if half else ".BF16")
        assert products_of(cubin)[name] == {opcode: 4 * int(groups[1])}, name
        unpacked = len(re.findall(r"F2FP\.F16\.E2M1\.UNPACK_B", body))
        assert unpacked == (16 if half and arch != "90a" else 0), name


@pytest.mark.parametrize(
    "arch", ["90a", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("100f", "120f"))]
)
def test_the_kernel_of_experts_is_compiled_for_sm90_alone(arch: str, compile_for: Compiler) -> None:
    """In every form the products of a stage, whose sums stay in registers: those that take x from
    its rows have them once more, for rows that end within a stage.
    """
    _, cubin = compile_for(arch, "nvfp4_moe/grouped.cu")
    seen = set[tuple[int, int]]()
    for name, body in sass_functions(cubin):
        form = re.search(r"OperandE.*FormILb(.)ELj(\d+)ELj.ELj(.)ELj.ELj.ELb(.)ELj.ELj(.)E", name)
        if not form:
            continue
        is_warpgroup, tokens, strips, from_rows, chunks = (int(part) for part in form.groups())
        seen.add((tokens, from_rows * chunks))
        pattern = r"\bHGMMA\.64x" if is_warpgroup else r"\bHMMA\.16816\.F32"
        products = [found.start() for found in re.finditer(pattern, body)]
        expected = 8 * strips if is_warpgroup else tokens * chunks * (1 + from_rows)
        assert len(products) == (expected if arch == "90a" else 0), name
        if not products:
            continue
        assert not re.search(r"\b(LDL|STL)\b", body[products[0] : products[-1]]), name
        for instruction in ("UTMALDG", "UBLKCP", "ACQBULK", "PREEXIT"):
            assert instruction in body, (name, instruction)
    assert seen == {(8, 1), (8, 2), *((tokens, 0) for tokens in (8, 16, 32, 64, 128))}


def test_a_plain_target_gets_the_software(compile_for: Compiler) -> None:
    """ptxas 13.0 refuses the instruction for sm_120 without f or a; the sources compile for it all
    the same.
    """
    ptx, _ = compile_for("120", "conversions/probe.cu")
    assert "e2m1x2" not in ptx


@pytest.mark.parametrize(
    "arch",
    ["90a", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("100f", "120f", "121a"))],
)
def test_the_kernel_before_attention_overlaps_and_converts_by_instructions(
    arch: str, compile_for: Compiler
) -> None:
    """Its loads come after the wait for the kernel before, but for one of weights and one of a
    scale.
    """
    _, cubin = compile_for(arch, "attention_front/kernel.cu")
    resources, functions = resources_of(cubin), sass_functions(cubin)
    assert_nothing_spilled(cubin, 6)
    assert len(resources) == 6
    for name, body in functions:
        assert "PREEXIT" in body and "F2FP.SATFINITE.E4M3" in body, name
        before, _, after = body.partition("ACQBULK")
        assert after and len(re.findall(r"\bLDG", before)) <= 2 < len(
            re.findall(r"\bLDG", after)
        ), name


@pytest.mark.parametrize(
    "arch",
    ["90a", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("100f", "120f", "121a"))],
)
def test_linear_attention_overlaps_and_spills_nothing(arch: str, compile_for: Compiler) -> None:
    """A decode step brings the state to shared memory by asynchronous copies, and its cluster meets
    once; a step of prompts has no cluster.
    """
    _, cubin = compile_for(arch, "gated_delta/kernel.cu")
    assert_nothing_spilled(cubin, 9)
    for name, body in sass_functions(cubin):
        assert "PREEXIT" in body and "ACQBULK" in body, name
        assert ("UCGABAR_ARV" in body) == ("step" in name), name
        assert ("LDGSTS" in body) == ("step" in name or "rule" in name), name


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["90a", "100f", "120f", "121a"])
def test_decode_attention_has_instructions_of_every_target(
    arch: str, compile_for: Compiler
) -> None:
    """For each 16 tokens: two products for each 16 of the head dim and 8 rows of queries, values of
    FP8 converted once for all rows. Copies of single threads and overlapped launches; no
    warpgroup's product, no bulk copy.

    Half of the kernels are empty: forms for another size of shared memory.
    """
    _, cubin = compile_for(arch, "decode_attention/decode_attention.cu")
    resources = resources_of(cubin)
    seen, empty = set[tuple[int, bool, int]](), 0
    for name, body in sass_functions(cubin):
        dim, is_fp8, groups, is_small = attention_form(name)
        if is_small != arch.startswith("12"):
            assert not re.search(r"MMA|LDGSTS|MOVM|ACQBULK|PREEXIT", body), name
            empty += 1
            continue
        seen.add((dim, is_fp8, groups))
        opcode = "HMMA.16816.F32" + ("" if is_fp8 else ".BF16")
        assert products_of(cubin)[name] == {opcode: groups * dim // 8}, name
        unpacked = len(re.findall(r"F2FP\.F16\.E4M3\.UNPACK_B", body))
        assert unpacked == (dim // 2 if is_fp8 else 0), name
        assert len(re.findall(r"\bMOVM\.16\.MT88", body)) == 2 * groups, name
        copies = 16 * 2 * dim * (1 if is_fp8 else 2) // (32 * 16)  # of 16 bytes by a warp
        copied = len(re.findall(r"\bLDGSTS\S*\.128", body))
        assert copied and copied % copies == 0, name
        assert "ACQBULK" in body and "PREEXIT" in body, name
        assert not re.search(r"GMMA|UTMA|UBLKCP", body), name
        products = [found.start() for found in re.finditer(r"\bHMMA", body)]
        in_stack = re.findall(r"\b(LDL|STL)\b", body[products[0] : products[-1]])
        assert len(in_stack) <= (4 if dim == 256 and groups == 2 else 0), name
        assert resources[name]["STACK"] <= most_stack(arch, name), name
    forms = {(dim, fp8, rows) for dim in (64, 128, 256) for fp8 in (False, True) for rows in (1, 2)}
    assert seen == forms and empty == len(forms)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("arch", ["90a", "100f", "120f"])
def test_clusters_of_decode_attention_copy_tiles_at_once(
    arch: str, kind: str, compile_for: Compiler
) -> None:
    """By tensor maps, with the products of the other kernel. SM12x has none of it."""
    _, cubin = compile_for(arch, f"decode_attention/clusters/{kind}.cu")
    seen = set[tuple[int, int]]()
    for name, body in sass_functions(cubin):
        dim, is_fp8, groups, _ = attention_form(name)
        assert CLUSTERS in name and is_fp8 == (kind == "fp8"), name
        seen.add((dim, groups))
        if arch.startswith("12"):
            assert not re.search(r"MMA|UTMALDG|ACQBULK|PREEXIT", body), name
            continue
        opcode = "HMMA.16816.F32" + ("" if is_fp8 else ".BF16")
        assert products_of(cubin)[name] == {opcode: groups * dim // 8}, name
        assert all(word in body for word in ("UTMALDG", "ACQBULK", "PREEXIT")), name
        products = [found.start() for found in re.finditer(r"\bHMMA", body)]
        in_stack = re.findall(r"\b(LDL|STL)\b", body[products[0] : products[-1]])
        assert len(in_stack) <= (4 if most_stack(arch, name) else 0), name
    assert seen == {(64, 1), (64, 2), (128, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("arch", ["90a", "100f", "120f"])
def test_warpgroups_of_decode_attention_multiply_64_tokens_at_a_time(
    arch: str, kind: str, compile_for: Compiler
) -> None:
    """BF16 keys and values from where the copies put them, FP8 ones from registers. SM90 alone."""
    _, cubin = compile_for(arch, f"decode_attention/warpgroups/{kind}.cu")
    seen = set[tuple[int, int]]()
    for name, body in sass_functions(cubin):
        dim, is_fp8, groups, _ = attention_form(name)
        assert WARPGROUPS in name and is_fp8 == (kind == "fp8"), name
        seen.add((dim, groups))
        if arch != "90a":
            assert not re.search(r"MMA|UTMALDG|ACQBULK|PREEXIT", body), name
            continue
        steps = dim // 16 + 4 * dim // 64  # of scores, and of 64 tokens for each 64 elements
        assert len(re.findall(r"\bHGMMA\.64x", body)) == steps, name
        decoded = len(re.findall(r"F2FP\.F16\.E4M3\.UNPACK_B", body))
        assert decoded == (dim // 2 if is_fp8 else 0), name  # of a warp's 16 tokens' words
        assert all(word in body for word in ("UTMALDG", "ACQBULK", "PREEXIT", "STSM")), name
    assert seen == {(128, 1), (128, 2), (256, 1), (256, 2)}
