"""nvfp4_linear: every code and scale, sums within float32's rounding, layouts, edges and
refusals, on every instruction set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.kernels.kernel_cases import (
    activations,
    assert_rounded_once,
    assert_same_bits,
    bytes_of,
    fitting_scale,
    float_of,
    packed_weight,
    values_of,
    vectors,
)
from tests.support.machine_code import needs_disassembler, on_the_stack, vector_instructions
from tests.support.paths import ROOT

ROWS = (1, 2, 3, 4, 5, 8, 9, 17, 33, 260)  # both loops and their groups of rows
ONE = torch.ones(())


LEVELS = ("portable", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx")


@pytest.fixture(params=["reference", *LEVELS])
def level(request: pytest.FixtureRequest, kernels: object) -> Iterator[str]:
    """The specification, and the compiled code with each instruction set of this processor."""
    from nibble_kernels.nvfp4_linear import cpu_levels, use_cpu_level

    if request.param == "reference":
        yield request.param
        return
    best = cpu_levels()[0]
    if request.param not in cpu_levels():
        pytest.skip(f"this processor has no {request.param}")
    use_cpu_level(request.param)
    yield request.param
    use_cpu_level(best)


def linear(
    level: str,
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    global_scale: Tensor = ONE,
    **rest: Tensor,
) -> Tensor:
    from nibble_kernels.nvfp4_linear import nvfp4_linear, reference

    if level == "reference":
        names = ("column_scale", "bias", "input_scale_inv")
        return reference.nvfp4_linear(
            x, weight, scales, global_scale, *(rest.get(name) for name in names)
        )
    return nvfp4_linear(x, weight, scales, global_scale, **rest)


def test_every_code_with_every_scale_is_exact(level: str) -> None:
    """One column at a time picks each of 16 codes x 254 scales, of either nibble, with and
    without subnormal scales.
    """
    bytes_ = torch.tensor([byte for byte in range(256) if byte & 127 != 127], dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8)
    block = torch.cat([codes[0::2] | codes[1::2] << 4] * 4)  # 64 columns: each code in order
    weight = block.expand(len(bytes_), -1).contiguous()
    scales = bytes_[:, None].expand(-1, 4).contiguous().view(torch.float8_e4m3fn)
    found = linear(level, torch.eye(64), weight, scales)
    assert torch.equal(found.double(), values_of(weight, scales).T + 0.0)
    for row in (0, 17, 63):  # the loop for few rows
        assert torch.equal(
            linear(level, torch.eye(64)[row : row + 1], weight, scales), found[row : row + 1]
        )


def test_every_pair_of_codes_with_every_scale_is_exact(level: str) -> None:
    """All 256 bytes of codes x 254 scales, packed too, by both loops."""
    bytes_ = torch.tensor([byte for byte in range(256) if byte & 127 != 127], dtype=torch.uint8)
    weight = torch.arange(256).to(torch.uint8).expand(len(bytes_), -1).contiguous()
    scales = bytes_[:, None].expand(-1, 32).contiguous().view(torch.float8_e4m3fn)
    x, exact = torch.eye(512).bfloat16(), values_of(weight, scales).T + 0.0
    found = linear(level, x.float(), weight, scales)
    assert torch.equal(found.double(), exact)
    for row in (0, 255, 504):
        few = linear(level, x[row : row + 8], weight, scales)
        assert torch.equal(few, exact[row : row + 8].bfloat16())
        assert torch.equal(packed_linear(level, x[row : row + 8], weight, scales), few)


def test_every_product_of_quantized_codes_is_exact(level: str) -> None:
    """16 codes of activations x 16 codes of weights x 254 scales, alone in their blocks."""
    each = torch.arange(0, 256, 17).to(torch.uint8)[:, None].expand(-1, 8)
    values = values_of(each, torch.ones(16, 1))[:, :1]
    x = torch.zeros(16, 16)
    x[:, :1], x[:, 1] = values.float(), 6.0  # the block scale is 1
    bytes_ = torch.tensor([byte for byte in range(256) if byte & 127 != 127], dtype=torch.uint8)
    weight = torch.zeros(16, len(bytes_), 8, dtype=torch.uint8)
    weight[:, :, 0] = torch.arange(16, dtype=torch.uint8)[:, None]
    scales = bytes_.expand(16, -1).reshape(-1, 1).contiguous().view(torch.float8_e4m3fn)
    exact = values @ values_of(weight.flatten(0, 1), scales)[:, :1].T
    for rows in (slice(0, 16), slice(0, 8), slice(8, 16), slice(3, 4)):
        found = linear(level, x[rows], weight.flatten(0, 1), scales, input_scale_inv=ONE)
        assert torch.equal(found.double(), exact[rows] + 0.0)


def integer_reference(x: Tensor, weight: Tensor, scales: Tensor, inverse: Tensor) -> Tensor:
    """W4A4 by definition: exact integers in a block, times both scales, added block by block in
    float32.
    """
    from nibble_kernels.activation_quant.reference import nvfp4_quant

    codes, x_scales = nvfp4_quant(x, inverse, tiled=False, exact=True)
    ones = [torch.ones_like(scale.float()) for scale in (x_scales, scales)]
    doubled = [2 * values_of(c, one) for c, one in zip((codes, weight), ones, strict=True)]
    a, b = (each.long().unflatten(-1, (-1, 16)) for each in doubled)
    dots = torch.einsum("mbk,nbk->mnb", a, b)
    parts = dots.double() / 4 * x_scales.double()[:, None] * scales.double()
    assert torch.equal(parts.float().double(), parts)  # each part is exact in float32
    total = torch.zeros(parts.shape[:2])
    for block in range(parts.shape[2]):
        total = total + parts[:, :, block].float()
    return total * (1 / inverse)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_quantized_blocks_are_exact_with_every_scale(level: str, sign: int) -> None:
    """Every scale of activations, with blocks whose sums are the largest that there are."""
    if level == "reference":
        pytest.skip("torch's own matrix product adds in its own order")
    every = torch.arange(0x7F).to(torch.uint8).view(torch.float8_e4m3fn).float()[:, None]
    x = torch.cat([6 * every.expand(-1, 16), -6 * every.expand(-1, 16)], dim=1)
    weight = torch.tensor([0x77, 0xFF, 0x7F, 0x00]).to(torch.uint8)[:, None].expand(-1, 16)
    scales = torch.tensor([448.0, 2**-9])[None].expand(4, -1).to(torch.float8_e4m3fn)
    operands = weight.contiguous(), scales.contiguous()
    inverse = torch.tensor(float(sign))
    expected = integer_reference(x, *operands, inverse)
    for first, count in ((0, 127), (0, 8), (120, 3), (126, 1)):
        rows = slice(first, first + count)
        found = linear(level, x[rows], *operands, input_scale_inv=inverse)
        assert torch.equal(found, expected[rows]), (first, count)


@pytest.mark.parametrize("columns", [16, 48, 576, 1040])
def test_quantized_products_are_those_of_integers_to_the_bit(level: str, columns: int) -> None:
    """On every level and for any number of rows."""
    if level == "reference":
        pytest.skip("torch's own matrix product adds in its own order")
    weight, scales = packed_weight(49, columns)
    x = activations(37, columns, torch.float32)
    inverse = fitting_scale(x)
    expected = integer_reference(x, weight, scales, inverse)
    for rows in (slice(0, 37), slice(0, 8), slice(5, 10), slice(36, 37)):
        found = linear(level, x[rows], weight, scales, input_scale_inv=inverse)
        assert_same_bits((found,), (expected[rows],), rows)


def test_packing_is_undone_bit_for_bit(kernels: object) -> None:
    """Compiled as specified, for numbers of rows that fill no tile, too."""
    from nibble_kernels.nvfp4_linear import packed

    for rows, columns in product((1, 15, 16, 17, 50), (16, 48, 576)):
        weight, scales = packed_weight(rows, columns)
        found = packed.pack_weight(weight, scales)
        assert_same_bits(found[:2], packed._pack_reference(weight, scales), (rows, columns))
        assert found.codes.numel() + found.scales.numel() == -(-rows // 16) * 9 * columns
        assert_same_bits(packed.stored_weight(found), (weight, scales), (rows, columns))
        assert_same_bits(packed._unpack_reference(*found), (weight, scales), (rows, columns))


def packed_linear(level: str, x: Tensor, weight: Tensor, scales: Tensor, **rest: Tensor) -> Tensor:
    from nibble_kernels.nvfp4_linear import packed

    if level == "reference":
        return linear(level, x, *packed.stored_weight(packed.pack_weight(weight, scales)), **rest)
    return packed.nvfp4_packed_linear(x, packed.pack_weight(weight, scales), ONE, **rest)


def test_a_packed_weight_gives_the_same_bits(level: str) -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for columns, outputs, dtype in product((16, 208, 576), (1, 49, 96), dtypes):
        weight, scales = packed_weight(outputs, columns)
        rest = {"column_scale": torch.rand(outputs) + 0.5, "bias": torch.randn(outputs).to(dtype)}
        for rows in (1, 3, 8, 9, 70):
            x = torch.randn(rows, columns).to(dtype)
            for more in (rest, rest | {"input_scale_inv": torch.tensor([30.0])}):
                expected = linear(level, x, weight, scales, **more)
                found = packed_linear(level, x, weight, scales, **more)
                assert_same_bits((found,), (expected,), (columns, outputs, dtype, rows))
                again = packed_linear(level, x, weight, scales, **more)
                assert_same_bits((again,), (found,), "once more")


@pytest.mark.parametrize("rows", [2, 12])
def test_infinity_and_nan_in_x_stay_in_their_row(level: str, rows: int) -> None:
    weight = torch.full((17, 8), 0x22, dtype=torch.uint8)  # ones
    scales = torch.ones(17, 1).to(torch.float8_e4m3fn)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.ones(rows, 16, dtype=dtype)
        x[0, 3], x[1, 5] = torch.inf, torch.nan
        found = linear(level, x, weight, scales)
        assert (found[0] == torch.inf).all() and found[1].isnan().all()
        assert (found[2:] == 16).all()


def test_the_levels_are_those_of_the_processor(kernels: object) -> None:
    from nibble_kernels.nvfp4_linear import cpu_levels

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(
        next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split()
    )
    needs = {
        "amx": {"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512_vbmi", "avx512_vnni"},
        "avx512_bf16": {"avx512f", "avx512bw", "avx512vl", "avx512_vbmi", "avx512_vnni"},
        "avx512_vnni": {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"},
        "avx512": {"avx512f"},
        "avx_vnni": {"avx2", "fma", "f16c", "avx_vnni"},
        "avx2": {"avx2", "fma", "f16c"},
        "portable": set(),
    }
    assert cpu_levels()[-1] == "portable" and list(needs) == list(reversed(LEVELS))
    for name in cpu_levels():
        here = {flag.replace("avx512vbmi", "avx512_vbmi") for flag in flags}
        assert needs[name] <= here
    if "avx512_bf16" in flags and "avx512vbmi" in flags:
        assert "avx512_bf16" in cpu_levels()[:2]


def test_a_nan_scale_shows(level: str) -> None:
    weight, scales = packed_weight(3, 64)
    scales.view(torch.uint8)[1, 2] = 0x7F
    for rows in (1, 16):
        assert linear(level, torch.ones(rows, 64), weight, scales).isnan().any(0).tolist() == [
            False,
            True,
            False,
        ]


@pytest.mark.when_changed(*OPERATORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_those_of_float32(level: str, dtype: torch.dtype) -> None:
    """Any number of rows on either side, rows that end inside what is decoded at a time, all
    factors.
    """
    for columns, outputs in product((16, 48, 64, 208, 1040, 2064), (1, 5, 24, 49)):
        weight, scales = packed_weight(outputs, columns)
        column_scale, bias = torch.rand(outputs) + 0.5, torch.randn(outputs).to(dtype)
        for rows in ROWS:
            x = torch.randn(rows, columns).to(dtype)
            found = linear(
                level, x, weight, scales, torch.tensor(0.001), column_scale=column_scale, bias=bias
            )
            factor = torch.tensor(0.001).double() * column_scale.double()
            assert_rounded_once(found, x, values_of(weight, scales), factor, bias.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_values_beside_large_ones_keep_their_bits(level: str, dtype: torch.dtype) -> None:
    """Also where the weights of the large ones are zero."""
    weight, scales = packed_weight(49, 208)
    for rows in (1, 4, 8, 9, 40):
        x = (torch.randn(rows, 208) * torch.exp2(torch.randint(-60, 30, (rows, 208)))).to(dtype)
        x[:, 3], x[:, 16:32] = 2.0**100, 0.0
        zeros = weight.clone()
        zeros[:, 1] &= 0x0F  # of column 3
        found = linear(level, x, zeros, scales)
        assert_rounded_once(
            found, x, values_of(zeros, scales), torch.ones(49).double(), torch.zeros(49).double()
        )


def test_quantized_activations_are_those_of_nvfp4_quant(level: str) -> None:
    """W4A4: the product of the two quantized operands."""
    from nibble_kernels.activation_quant.reference import nvfp4_quant

    for columns, rows in product((16, 208, 1040), ROWS):
        weight, scales = packed_weight(49, columns)
        x = activations(rows, columns, torch.bfloat16)
        inverse = fitting_scale(x)
        codes, x_scales = nvfp4_quant(x, inverse, tiled=False, exact=True)
        found = linear(
            level, x.float(), weight, scales, torch.tensor(0.01), input_scale_inv=inverse
        )
        factor = torch.tensor(0.01).double() / inverse.double()
        assert_rounded_once(found, values_of(codes, x_scales), values_of(weight, scales), factor)


def test_a_published_quantizers_weights(level: str) -> None:
    """ModelOpt's own tensors times the unit matrix are the values that the vectors tell."""
    for case in vectors("nvfp4_weights_modelopt")["vectors"]:
        rows, columns = case["shape"]
        weight = bytes_of(case["weight_packed_hex"]).view(rows, columns // 2)
        scales = (
            bytes_of(case["weight_scale_e4m3_hex"])
            .view(rows, columns // 16)
            .view(torch.float8_e4m3fn)
        )
        global_scale = float_of(case["weight_scale_2_f32_bits"])
        expected = bytes_of(case["dequant_f32_le_hex"]).view(torch.float32).view(rows, columns)
        found = linear(level, torch.eye(columns), weight, scales, global_scale).T
        torch.testing.assert_close(found, expected, rtol=2.0**-23, atol=0)


def test_a_row_does_not_depend_on_the_others(level: str) -> None:
    """Within each of the two loops: alone or among up to eight, and among nine or among three
    hundred.
    """
    if level == "reference":
        pytest.skip("torch's own matrix product promises nothing")
    weight, scales = packed_weight(50, 1040)
    x = torch.randn(300, 1040)
    few, many = linear(level, x[:8], weight, scales), linear(level, x, weight, scales)
    for row in range(8):
        assert torch.equal(linear(level, x[row : row + 1], weight, scales), few[row : row + 1])
    if level in ("avx2", "avx_vnni", "avx512_vnni"):  # words
        # One row alone is multiplied as digits, where its scale allows that.
        halves = x.bfloat16() * torch.exp2(torch.tensor([0, 90, 108, -50, -80, 0, 0, 0]))[
            torch.arange(len(x)) % 8, None
        ].to(torch.bfloat16)
        halves[5] = 255 / 128  # the largest significand
        halves[6, ::7] *= 2.0**-9
        all_rows = linear(level, halves, weight, scales)
        assert all_rows.isfinite().all()
        assert torch.equal(linear(level, halves[:8], weight, scales), all_rows[:8])
        for row in range(8):
            alone = linear(level, halves[row : row + 1], weight, scales)
            assert torch.equal(alone, all_rows[row : row + 1]), row
    for begin, end in ((0, 9), (5, 40), (250, 300)):
        assert torch.equal(linear(level, x[begin:end], weight, scales), many[begin:end])
    long = torch.cat((x, x[:220]))  # the last ones are few, beyond a whole number of portions
    assert torch.equal(linear(level, long, weight, scales), torch.cat((many, many[:220])))


def test_a_row_of_tiny_numbers_is_right_and_changes_no_other(level: str) -> None:
    """Scales of 16-bit words could be too small for exponents then. Products of BF16 take what is
    below 2^-126 as zero.
    """
    if level == "reference":
        pytest.skip("torch's own matrix product promises nothing")
    weight, scales = packed_weight(50, 208)
    x = torch.randn(20, 208).bfloat16()
    many = linear(level, x, weight, scales)
    for exponent in (-90, -100, *(() if level in ("avx512_bf16", "amx") else (-110, -126))):
        with_tiny = x.clone()
        with_tiny[3] *= 2.0**exponent
        with_tiny[3, 16:32] = 2.0**-133
        found = linear(level, with_tiny, weight, scales)
        others = [row for row in range(20) if row != 3]
        assert torch.equal(found[others], many[others]), exponent
        exact = with_tiny[3].double() @ values_of(weight, scales).T
        bound = exact.abs() * 2.0**-8 + with_tiny[3].double().norm() * 2.0**-10
        assert ((found[3].double() - exact).abs() <= bound).all(), exponent


def test_the_number_of_threads_changes_nothing(level: str) -> None:
    if level == "reference":
        pytest.skip("torch's own matrix product promises nothing")
    weight, scales = packed_weight(500, 1040)
    threads = torch.get_num_threads()
    try:
        for rows in (1, 6, 40, 200):  # 200: rows are divided where threads are more than panels
            x, results = torch.randn(rows, 1040, dtype=torch.bfloat16), []
            x[0, 5] = torch.inf
            for count in (1, 2, 3, 4, 7, 16, 4, 1):
                torch.set_num_threads(count)
                inverse = torch.tensor([30.0])
                results += [
                    packed_linear(level, x, weight, scales),
                    packed_linear(level, x, weight, scales, input_scale_inv=inverse),
                ]
            assert_same_bits(tuple(results), tuple(results[:2]) * (len(results) // 2), rows)
    finally:
        torch.set_num_threads(threads)


@needs_disassembler
def test_four_rows_keep_the_sums_of_a_block_in_registers(kernels: object) -> None:
    """With totals that a later loop also uses, gcc 12 stores them twice and adds through memory:
    four rows took 25 ns a block instead of 19.
    """
    functions = vector_instructions(r"\S*few_word_rowsILi4E\S*")
    if not functions:
        pytest.skip("this compiler makes no levels")
    for lines in functions:
        assert len(lines) > 100
        assert len(on_the_stack(lines)) < 60  # 68 and 75 before


def test_any_leading_dimensions_and_strides(level: str) -> None:
    weight, scales = packed_weight(10, 64)
    x = torch.randn(3, 5, 2, 64)
    expected = linear(level, x.view(-1, 64), weight, scales)
    assert torch.equal(linear(level, x, weight, scales), expected.view(3, 5, 2, 10))
    wide = torch.randn(4, 128)
    assert torch.equal(
        linear(level, wide[:, 32:96], weight, scales),
        linear(level, wide[:, 32:96].clone(), weight, scales),
    )
    assert linear(level, torch.empty(0, 64), weight, scales).shape == (0, 10)
    assert linear(level, torch.empty(2, 0, 64), weight, scales, input_scale_inv=ONE).shape == (
        2,
        0,
        10,
    )
    assert linear(level, torch.ones(64), weight, scales).shape == (10,)


def test_wrong_arguments_are_refused(kernels: object) -> None:
    from nibble_kernels.nvfp4_linear import nvfp4_linear

    weight, scales = packed_weight(10, 64)
    x = torch.ones(2, 64)
    for message, args, rest in (
        ("blocks of 16 columns; got rows of 40", (torch.ones(2, 40), weight, scales, ONE), {}),
        ("uint8 codes", (x, weight.int(), scales, ONE), {}),
        ("float8_e4m3fn scales", (x, weight, scales.float(), ONE), {}),
        (r"codes \[..., 16\].*rows of 32", (torch.ones(2, 32), weight, scales, ONE), {}),
        (r"got \[10, 32\] and \[10, 3\]", (x, weight, scales[:, :3], ONE), {}),
        (r"global_scale must be float32 \[\]", (x, weight, scales, torch.ones(2)), {}),
        (
            r"column_scale must be float32 \[10\]",
            (x, weight, scales, ONE),
            {"column_scale": torch.ones(9)},
        ),
        ("bias must have one element", (x, weight, scales, ONE), {"bias": torch.ones(11)}),
        (
            "input_scale_inv must be float32",
            (x, weight, scales, ONE),
            {"input_scale_inv": torch.ones(1).double()},
        ),
    ):
        with pytest.raises(ValueError, match=message):
            nvfp4_linear(*args, **rest)
    with pytest.raises(RuntimeError, match="expected bfloat16"):
        nvfp4_linear(x.int(), weight, scales, ONE)
    with pytest.raises(RuntimeError, match="do not fit rows of 64"):
        torch.ops.nibble.nvfp4_linear(x, weight, scales[:5], ONE, None, None, None)


def test_what_is_no_packed_weight_is_refused(kernels: object) -> None:
    from nibble_kernels.nvfp4_linear.packed import nvfp4_packed_linear, pack_weight

    weight, scales = packed_weight(10, 64)
    packed = pack_weight(weight, scales)
    for message, x, given in (
        (r"codes \[1, 3, 128\] for rows of 48; got \[1, 4, 128\]", torch.ones(2, 48), packed),
        (r"17 rows must be codes \[2, 4, 128\]", torch.ones(2, 64), packed._replace(rows=17)),
        ("must be codes", torch.ones(2, 64), packed._replace(codes=weight)),
    ):
        with pytest.raises(ValueError, match=message):
            nvfp4_packed_linear(x, given, ONE)
    with pytest.raises(ValueError, match=r"bias must have one element for each of 10"):
        nvfp4_packed_linear(torch.ones(2, 64), packed, ONE, bias=torch.ones(16))
    with pytest.raises(RuntimeError, match="do not fit 10 rows of 64"):
        nvfp4_packed_linear(torch.ones(2, 64), packed._replace(scales=packed.scales[:, :2]), ONE)
    scales.view(torch.uint8)[3, 1] = 0xFF
    with pytest.raises(ValueError, match="a block scale is NaN"):
        pack_weight(weight, scales)


def test_memory_is_read_whole(kernels: object) -> None:
    from nibble_kernels.memory import read_memory

    x = torch.randint(0, 256, (3 << 20,), dtype=torch.uint8)
    assert read_memory(x) == x.view(torch.int64).sum().item()
    with pytest.raises(RuntimeError, match="multiple of 8 bytes"):
        read_memory(x[:9])


def test_the_operator_is_registered_soundly_and_compiles(kernels: object) -> None:
    import torch._dynamo.testing
    from nibble_kernels.nvfp4_linear import nvfp4_linear
    from nibble_kernels.nvfp4_linear.packed import pack_weight

    weight, scales = packed_weight(10, 64)
    args = (torch.randn(3, 64), weight, scales, ONE, torch.ones(10), torch.ones(10), ONE)
    checks = (
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )  # the other has no float8
    torch.library.opcheck(torch.ops.nibble.nvfp4_linear.default, args, test_utils=checks)
    packed = (args[0], *pack_weight(weight, scales), *args[3:])
    torch.library.opcheck(torch.ops.nibble.nvfp4_packed_linear.default, packed, test_utils=checks)
    torch._dynamo.reset()
    counter, graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager"), []
    traced = torch.compile(nvfp4_linear, backend=counter, fullgraph=True, dynamic=True)
    for rows in (7, 3, 12):
        x = torch.randn(rows, 64, dtype=torch.bfloat16)
        assert torch.equal(traced(x, weight, scales, ONE), nvfp4_linear(x, weight, scales, ONE))
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1


def test_without_compiled_code_the_result_is_the_same_within_rounding(
    installed: Path, tmp_path: Path
) -> None:
    """In a process that finds no library, from the sources."""
    program = (
        "import sys, torch; from nibble_kernels import implementations\n"
        "from nibble_kernels.nvfp4_linear import nvfp4_linear, cpu_levels\n"
        "args = torch.load(sys.argv[1])\n"
        "assert implementations()['cpu'] != 'compiled' and cpu_levels() == []\n"
        "torch.save(nvfp4_linear(*args[:4], input_scale_inv=args[4]), sys.argv[1])\n"
    )
    weight, scales = packed_weight(30, 208)
    x, file = torch.randn(5, 208), tmp_path / "args.pt"
    torch.save((x, weight, scales, ONE, torch.tensor([30.0])), file)
    sources = ROOT / "kernels/src"
    subprocess.run(
        [sys.executable, "-c", program, file],
        check=True,
        env=os.environ | {"PYTHONPATH": str(sources)},
    )
    expected = linear("compiled", x, weight, scales, input_scale_inv=torch.tensor([30.0]))
    torch.testing.assert_close(torch.load(file), expected, rtol=1e-5, atol=1e-3)
