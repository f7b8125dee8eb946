"""nibble::decoder_…: a decoder's layers against the formula, with every level of instructions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nibble_kernels import implementations
from nibble_kernels.activation_quant.reference import nvfp4_quant
from nibble_kernels.decoder import Decoder, DecoderLayer, Product, Shape, reference
from nibble_kernels.nvfp4_linear import cpu_levels, use_cpu_level
from nibble_kernels.nvfp4_linear.packed import pack_weight
from torch import Tensor

from tests.support.machine_code import needs_disassembler, on_the_stack, vector_instructions

needs_compiled = pytest.mark.skipif(
    implementations()["cpu"] != "compiled", reason="the formula itself computes"
)
SHAPES = {
    "grouped": Shape(64, 96, 4, 2, 32, 1e-6, 32**-0.5),
    "odd": Shape(48, 80, 3, 1, 16, 1e-5, 0.3),
    "one query each": Shape(32, 48, 2, 2, 80, 1e-6, 80**-0.5),
}
LAYERS, POSITIONS, BLOCK = 2, 200, 32
# Rounding to bfloat16 falls either way; sums differ in their order alone.
CLOSE = 0.04, 0.02  # absolute, relative


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The sizes are small, and other tests use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(actual: Tensor, expected: Tensor, tolerance: tuple[float, float] = CLOSE) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance[0], rtol=tolerance[1])


def made(shape: Shape, w4a4: bool, extras: bool, partial: bool = False) -> tuple[Decoder, int]:
    """A compiled decoder, and the number of the formula's."""
    torch.manual_seed(0)
    rotated = shape.head_size // 2 if partial else shape.head_size
    angles = torch.rand(POSITIONS, rotated // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).bfloat16()
    layers = [layer_of(shape, w4a4, extras) for _ in range(LAYERS)]
    norm = (torch.rand(shape.hidden) + 0.5).bfloat16()
    tensors = [tensor for layer in layers for tensor in layer.tensors()]
    sizes = dataclasses.astuple(shape)
    number = reference.new([*tensors, norm, cos_sin], LAYERS, *sizes)
    return Decoder(layers, norm, cos_sin, shape), number


def layer_of(shape: Shape, w4a4: bool, extras: bool) -> DecoderLayer:
    def norm(size: int) -> Tensor:
        return (torch.rand(size) + 0.5).bfloat16()

    def product(rows: int, columns: int) -> Product:
        weight = torch.randn(rows, columns) * columns**-0.5
        scale = 448 * 6 / weight.abs().max()
        codes, scales = nvfp4_quant(weight, scale, tiled=False, exact=True)
        return Product(
            pack_weight(codes, scales),
            1 / scale,
            column_scale=torch.rand(rows) + 0.5 if extras else None,
            bias=torch.randn(rows).bfloat16() * 0.1 if extras else None,
            input_scale_inv=torch.tensor(100.0) if w4a4 else None,
        )

    return DecoderLayer(
        product(shape.qkv_width, shape.hidden),
        product(shape.hidden, shape.queries * shape.head_size),
        product(2 * shape.intermediate, shape.hidden),
        product(shape.hidden, shape.intermediate),
        norm(shape.hidden),
        norm(shape.hidden),
        norm(shape.head_size) if extras else None,
        norm(shape.head_size) if extras else None,
    )


def cache_of(shape: Shape, blocks: int) -> list[Tensor]:
    torch.manual_seed(1)
    size = (blocks, shape.keys, BLOCK, 2 * shape.head_size)
    return [torch.randn(size).bfloat16() for _ in range(LAYERS)]


def sequences(lengths: list[int]) -> dict[str, Any]:
    """Blocks in no order, and the slot of each sequence's last token."""
    width = max(-(-length // BLOCK) for length in lengths)
    order = torch.randperm(len(lengths) * width, generator=torch.Generator().manual_seed(2))
    blocks = order.view(len(lengths), width).to(torch.int32)
    last = torch.tensor(lengths) - 1
    places = blocks[torch.arange(len(lengths)), last // BLOCK].long()
    return {
        "slots": places * BLOCK + last % BLOCK,
        "blocks": blocks,
        "lengths": torch.tensor(lengths, dtype=torch.int32),
    }


@needs_compiled
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("w4a4", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parts_are_the_formula(shape: Shape, w4a4: bool, extras: bool) -> None:
    decoder, number = made(shape, w4a4, extras, partial=extras)
    for level in cpu_levels():
        use_cpu_level(level)
        for rows in (1, 5, 11):
            torch.manual_seed(rows)
            start, added = torch.randn(2, rows, shape.hidden).bfloat16()
            positions = torch.randint(0, POSITIONS, (rows,))
            for hidden in (None, added):
                mine, theirs = start.clone(), start.clone()
                actual = decoder.before_attention(1, hidden, mine, positions)
                expected = reference.before_attention(number, 1, hidden, theirs, positions)
                check(actual, expected)
                assert torch.equal(mine, theirs)
            attended = torch.randn(rows, shape.queries * shape.head_size).bfloat16()
            mine, theirs = start.clone(), start.clone()
            actual = decoder.after_attention(0, attended, mine)
            expected = reference.after_attention(number, 0, attended, theirs)
            check(actual, expected, FLIPPED if w4a4 else CLOSE)
            check(mine, theirs)
            actual = decoder.last_norm(added, mine)
            expected = reference.last_norm(number, added, theirs)
            check(actual, expected)
    use_cpu_level(cpu_levels()[0])


# An input near a midpoint of two FP4 codes may come to either after its own rounding.
FLIPPED = 0.3, 0.1


@needs_compiled
@pytest.mark.parametrize("window", [0, 7, 64])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_step_is_the_formula(shape: Shape, window: int) -> None:
    decoder, number = made(shape, False, True)
    lengths = [1, 33, 64, 150, 2, 97, 32, 31, 128, 65]
    given = sequences(lengths)
    given["slots"][4] = -1
    check_step(decoder, number, given["lengths"].long() - 1, given | {"window": window})


def check_step(decoder: Decoder, number: int, positions: Tensor, given: dict[str, Any]) -> None:
    """Results and caches of a step, beside the formula's."""
    torch.manual_seed(3)
    start = torch.randn(len(positions), decoder.shape.hidden).bfloat16()
    caches, expected_caches = (cache_of(decoder.shape, given["blocks"].numel()) for _ in range(2))
    actual = decoder.step(start.clone(), positions, caches, **given)
    check(actual, reference.step(number, start.clone(), positions, expected_caches, **given))
    for mine, theirs in zip(caches, expected_caches, strict=True):
        check(mine, theirs)


def prompts(lengths_and_new: list[tuple[int, int]]) -> tuple[dict[str, Any], Tensor]:
    """As `sequences`, with some new tokens each, and their positions."""
    given = sequences([length for length, _ in lengths_and_new])
    positions = [
        torch.arange(length - new, length, dtype=torch.int64) for length, new in lengths_and_new
    ]
    given["slots"] = torch.cat(
        [
            blocks[own // BLOCK].long() * BLOCK + own % BLOCK
            for blocks, own in zip(given["blocks"], positions, strict=True)
        ]
    )
    starts = torch.tensor([0, *(new for _, new in lengths_and_new)]).cumsum(0)
    return given | {"starts": starts.to(torch.int32)}, torch.cat(positions)


# Of a sequence, tokens and how many of them are new: prompts, some behind a prefix, and a decode
# step among them.
MIXED = [(40, 40), (33, 7), (150, 1), (64, 13), (97, 97), (5, 5), (70, 6)]


@needs_compiled
@pytest.mark.parametrize("window", [0, 7, 64])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_step_with_prompts_is_the_formula(shape: Shape, window: int) -> None:
    decoder, number = made(shape, False, True)
    given, positions = prompts(MIXED)
    check_step(decoder, number, positions, given | {"window": window})


@needs_compiled
@pytest.mark.parametrize("window", [0, 20])
def test_a_prompt_has_the_bits_of_its_parts(window: int) -> None:
    """Whole, in two parts, and token by token, on one thread or four."""
    shape = SHAPES["grouped"]
    decoder, _ = made(shape, False, True)
    torch.manual_seed(6)
    start, found = torch.randn(77, shape.hidden).bfloat16(), []
    for threads, parts in ((1, [77]), (4, [77]), (1, [50, 27]), (4, [1] * 77)):
        torch.set_num_threads(threads)
        caches, done, results = cache_of(shape, 3), 0, []
        for new in parts:
            given, positions = prompts([(done + new, new)])
            given["blocks"] = torch.tensor([[2, 0, 1]], dtype=torch.int32)
            own = torch.arange(done, done + new)
            given["slots"] = given["blocks"][0][own // BLOCK].long() * BLOCK + own % BLOCK
            some = start[done : done + new].clone()
            results.append(decoder.step(some, positions, caches, **given, window=window))
            done += new
        found.append((torch.cat(results), *caches))
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


@needs_compiled
def test_rows_and_threads_change_no_bit() -> None:
    shape = SHAPES["grouped"]
    decoder, _ = made(shape, True, True)
    lengths = [40, 3, 90, 64]
    given = sequences(lengths)
    torch.manual_seed(4)
    start, positions = torch.randn(4, shape.hidden).bfloat16(), given["lengths"].long() - 1
    found = []
    for count in (1, 2, 3, 4, 4, 1):
        torch.set_num_threads(count)
        caches = cache_of(shape, given["blocks"].numel())
        found.append(decoder.step(start.clone(), positions, caches, **given))
    torch.set_num_threads(1)
    assert all(torch.equal(found[0], other) for other in found)
    for row in range(4):
        caches, part = cache_of(shape, given["blocks"].numel()), slice(row, row + 1)
        alone = {name: value[part] for name, value in given.items()}
        one = decoder.step(start[part].clone(), positions[part], caches, **alone)
        assert torch.equal(one, found[0][part])


@needs_compiled
def test_what_does_not_fit_is_refused() -> None:
    shape = SHAPES["grouped"]
    decoder, _ = made(shape, False, False)
    x = torch.randn(2, shape.hidden).bfloat16()
    with pytest.raises(RuntimeError, match="position 200 of 200"):
        decoder.before_attention(0, None, x, torch.tensor([0, POSITIONS]))
    with pytest.raises(RuntimeError, match="no layer 2"):
        decoder.before_attention(2, None, x, torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match="residual must be contiguous bfloat16 rows of 64"):
        decoder.before_attention(0, None, x.float(), torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match="a cache for each layer"):
        decoder.step(x, torch.tensor([0, 1]), [], **sequences([1, 2]))
    for starts, message in (([0, 3], "from 0 to the number of rows"), ([0, 2, 1, 2], "must rise")):
        given: dict[str, Any] = sequences([3, 3, 3])
        given["starts"] = torch.tensor(starts, dtype=torch.int32)
        with pytest.raises(RuntimeError, match=message):
            decoder.step(x, torch.tensor([0, 1]), cache_of(shape, 3), **given)
    layer = layer_of(shape, False, False)
    wrong = layer._replace(input_norm=layer.input_norm[:3])
    cos_sin = torch.zeros(8, shape.head_size).bfloat16()
    with pytest.raises(RuntimeError, match="a norm must be bfloat16, 64 elements"):
        Decoder([wrong], layer.input_norm, cos_sin, shape)


@needs_compiled
@pytest.mark.parametrize("w4a4", [False, True])
def test_prompts_on_more_threads_than_a_narrow_layer_has_panels(w4a4: bool) -> None:
    shape = SHAPES["grouped"]
    decoder, _ = made(shape, w4a4, True)
    start = torch.randn(150, shape.hidden).bfloat16()
    attended = torch.randn(150, shape.queries * shape.head_size).bfloat16()
    positions, found = torch.arange(150), []
    for count in (1, 16, 5):
        torch.set_num_threads(count)
        residual = start.clone()
        qkv = decoder.before_attention(0, None, residual, positions)
        found.append((qkv, decoder.after_attention(0, attended, residual), residual))
    assert all(
        torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True)
    )


@needs_compiled
def test_work_of_few_pieces_leaves_no_threads_behind() -> None:
    """Operators of a layer have different numbers of pieces, some fewer than threads."""
    shape = SHAPES["grouped"]
    decoder, _ = made(shape, False, True)
    attended = torch.randn(3, shape.queries * shape.head_size).bfloat16()
    positions = torch.arange(3)
    torch.set_num_threads(24)

    def layer() -> int:
        residual = torch.zeros(3, shape.hidden).bfloat16()
        decoder.before_attention(0, None, residual, positions)
        decoder.after_attention(0, attended, residual)
        return len(list(Path("/proc/self/task").iterdir()))

    first = layer()
    assert max(layer() for _ in range(20)) == first


@needs_compiled
@needs_disassembler
@pytest.mark.parametrize("level", ["x86_64_v3", "x86_64_v4"])
@pytest.mark.parametrize(
    "name", ["score_block", "add_values", "score_block_of_rows", "add_values_of_rows"]
)
def test_attention_keeps_its_sums_in_registers(name: str, level: str) -> None:
    """gcc 12 moves vectors wider than registers through the stack: a step of four sequences of 1024
    tokens took 3.6 times as long.
    """
    functions = vector_instructions(rf"\S*{name}\S*{level}")
    if not functions:
        pytest.skip("this compiler makes no levels")
    assert len(functions[0]) > 10
    assert len(on_the_stack(functions[0])) < 10
