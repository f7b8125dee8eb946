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
from tests.support.paths import ROOT

ROWS = (1, 2, 3, 4, 5, 8, 9, 17, 33, 260)  # both loops, their groups and their chunks of rows
ONE = torch.ones(())


@pytest.fixture(params=["reference", "portable", "avx2", "avx512"])
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
    for begin, end in ((0, 9), (5, 40), (250, 300)):
        assert torch.equal(linear(level, x[begin:end], weight, scales), many[begin:end])


def test_the_number_of_threads_changes_nothing(level: str) -> None:
    if level == "reference":
        pytest.skip("torch's own matrix product promises nothing")
    weight, scales = packed_weight(500, 1040)
    threads = torch.get_num_threads()
    try:
        for rows in (1, 6, 40):
            x, results = torch.randn(rows, 1040, dtype=torch.bfloat16), []
            for count in (1, 2, 3, 7):
                torch.set_num_threads(count)
                results.append(
                    linear(level, x, weight, scales, input_scale_inv=torch.tensor([30.0]))
                )
            assert_same_bits(tuple(results), (results[0],) * len(results), rows)
    finally:
        torch.set_num_threads(threads)


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


def test_the_operator_is_registered_soundly_and_compiles(kernels: object) -> None:
    import torch._dynamo.testing
    from nibble_kernels.nvfp4_linear import nvfp4_linear

    weight, scales = packed_weight(10, 64)
    args = (torch.randn(3, 64), weight, scales, ONE, torch.ones(10), torch.ones(10), ONE)
    checks = (
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )  # the other has no float8
    torch.library.opcheck(torch.ops.nibble.nvfp4_linear.default, args, test_utils=checks)
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
