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
}


@pytest.fixture(scope="module")
def blocks(kernels: ModuleType) -> ModuleType:
    import nibble_kernels.gguf_blocks

    return nibble_kernels.gguf_blocks


def random_blocks(kind: str) -> numpy.ndarray:
    """Any bytes, with finite scales."""
    random = numpy.random.default_rng(sum(kind.encode()))
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
