"""llama.cpp's blocks as bfloat16: the values of the library gguf, rounded once."""

from __future__ import annotations

from types import ModuleType

import numpy
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

COUNT = 777
# Where a block has a float16
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "BF16": (),
    "F16": (),
    "F32": (),
}
NUMBERS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@pytest.fixture(scope="module")
def blocks(kernels: ModuleType) -> ModuleType:
    import nibble_kernels.gguf_blocks

    return nibble_kernels.gguf_blocks


def random_blocks(kind: str) -> numpy.ndarray:
    """Any bytes, with finite scales."""
    random = numpy.random.default_rng(sum(kind.encode()))
    if kind in NUMBERS:
        numbers = torch.from_numpy(random.standard_normal((COUNT, 1))).to(NUMBERS[kind])
        return numbers.view(torch.uint8).numpy()
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    found = random.integers(0, 256, (COUNT, size), dtype=numpy.uint8)
    for at in HALVES[kind]:
        scales = random.standard_normal((COUNT, 1)) * random.choice([1e-6, 0.01, 3.0], (COUNT, 1))
        found[:, at : at + 2] = scales.astype(numpy.float16).view(numpy.uint8)
    return found


@pytest.mark.parametrize("kind", HALVES)
def test_values_are_those_of_the_library(blocks: ModuleType, kind: str) -> None:
    raw = random_blocks(kind)
    stated = torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind])).reshape(-1).bfloat16()
    for convert in (blocks.gguf_to_bfloat16, blocks.reference.to_bfloat16):
        found = convert(torch.from_numpy(raw), kind)
        assert torch.equal(found.view(torch.int16), stated.view(torch.int16))


def test_the_table_is_the_librarys_and_complete(blocks: ModuleType) -> None:
    assert blocks.BLOCKS.keys() == HALVES.keys()
    for kind, sizes in blocks.BLOCKS.items():
        assert sizes == GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


def test_a_scale_that_is_not_finite_gives_no_number(blocks: ModuleType) -> None:
    raw = torch.zeros(18, dtype=torch.uint8)
    raw[:2] = torch.tensor([float("nan")], dtype=torch.float16).view(torch.uint8)
    assert blocks.gguf_to_bfloat16(raw, "Q4_0").isnan().all()


def test_other_types_and_parts_of_blocks_are_refused(blocks: ModuleType) -> None:
    with pytest.raises(ValueError, match="Q2_K"):
        blocks.gguf_to_bfloat16(torch.zeros(84, dtype=torch.uint8), "Q2_K")
    with pytest.raises(ValueError, match="multiple of 18"):
        blocks.gguf_to_bfloat16(torch.zeros(17, dtype=torch.uint8), "Q4_0")


@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("heads", [0, 3])
@pytest.mark.parametrize("kind", HALVES)
def test_nvfp4_is_that_of_the_values(
    blocks: ModuleType, kind: str, heads: int, four_over_six: bool
) -> None:
    """Compiled and in plain torch: the bytes of quantizing the values in bfloat16."""
    from nibble_kernels.weight_quant import quantize

    elements, _ = blocks.BLOCKS[kind]
    rows, columns = 12, max(32, elements)
    raw = torch.from_numpy(random_blocks(kind))[: rows * columns // elements]
    values = blocks.gguf_to_bfloat16(raw, kind).view(rows, columns)
    largest = blocks.gguf_largest_magnitude(raw, kind)
    assert torch.equal(largest, values.abs().amax().float())
    assert torch.equal(largest, blocks.reference.largest_magnitude(raw, kind))
    if heads:  # the first of each RoPE pair, then the second
        values = values.view(heads, rows // heads // 2, 2, columns).transpose(1, 2)
        values = values.reshape(rows, columns)
    amax = largest * 1.5
    stated = quantize(values, amax, four_over_six=four_over_six)
    for compute in (blocks._to_nvfp4, blocks.reference.to_nvfp4):
        packed = torch.empty(rows, columns // 2, dtype=torch.uint8)
        scales = torch.empty(rows, columns // 16, dtype=torch.float8_e4m3fn)
        compute(raw, kind, heads, amax, stated.global_scale, four_over_six, packed, scales)
        assert torch.equal(packed, stated.packed)
        assert torch.equal(scales.view(torch.uint8), stated.scales.view(torch.uint8))
    scale = blocks.gguf_to_nvfp4(raw, kind, amax, packed, scales, four_over_six=four_over_six)
    assert torch.equal(scale, stated.global_scale)


@pytest.mark.parametrize("spread", [0, 1, 5, 20, 254])
@pytest.mark.parametrize("shared", [1.0, 1e-10, 1e-30, 0.0])
def test_bfloat16_of_any_magnitude(blocks: ModuleType, spread: int, shared: float) -> None:
    """Every significand, in blocks whose exponents differ by up to `spread`, with a scale for the
    largest of them or one so small that it becomes zero.
    """
    random = numpy.random.default_rng(spread)
    rows, columns = 64, 1024
    largest = numpy.repeat(random.integers(0, 255, rows * columns // 16), 16)
    exponents = (largest - random.integers(0, spread + 1, rows * columns)).clip(0)
    bits = random.integers(0, 1 << 16, rows * columns) & 0x807F | exponents << 7
    raw = torch.from_numpy(bits.astype(numpy.uint16).view(numpy.uint8))
    amax = blocks.gguf_largest_magnitude(raw, "BF16") * shared
    found = []
    for compute in (blocks._to_nvfp4, blocks.reference.to_nvfp4):
        packed = torch.empty(rows, columns // 2, dtype=torch.uint8)
        scales = torch.empty(rows, columns // 16, dtype=torch.float8_e4m3fn)
        compute(raw, "BF16", 0, amax, amax / 2688, False, packed, scales)
        found.append((packed, scales.view(torch.uint8)))
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][0], found[1][0])


def test_a_result_of_another_size_is_refused(blocks: ModuleType) -> None:
    raw = torch.zeros(2 * 18, dtype=torch.uint8)
    packed = torch.empty(1, 16, dtype=torch.uint8)
    scales = torch.empty(1, 2, dtype=torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="of 32 elements"):
        blocks.gguf_to_nvfp4(raw, "Q4_0", torch.tensor(1.0), packed, scales)
    with pytest.raises(RuntimeError, match="rows are not those of 3 heads"):
        blocks.gguf_to_nvfp4(
            raw[:18], "Q4_0", torch.tensor(1.0), packed, scales, interleaved_heads=3
        )


def test_a_number_that_is_not_finite_is_the_largest(blocks: ModuleType) -> None:
    raw = torch.zeros(3 * 18, dtype=torch.uint8)
    raw[18:20] = torch.tensor([float("nan")], dtype=torch.float16).view(torch.uint8)
    assert blocks.gguf_largest_magnitude(raw, "Q4_0").isnan()
    assert float(blocks.gguf_largest_magnitude(raw[:0], "Q4_0")) == 0.0
