"""The decode attention's own source without a GPU: compiled by g++, with lanes that take turns.

Only the instructions are stood in for (emulator/nibble/tensor_core.cuh). Runs the division of
sequences, page tables, both orders of the cache, masks, sums of warps and chunks; copies are over
at once, or only when they are waited for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.kernels.attention_cases import FP8, Case, assert_close, make_case
from tests.support.kernels.emulated import compile_on_the_host, needs_compiler

BLOCKS = 5
# Whether blocks or clusters of them compute, when copies are over, and whether the kernel before it
# writes queries and new tokens alone. Then warpgroups divide a sequence as in a batch of few.
FORMS = [
    ("blocks", "at once", "waits"),
    ("blocks", "late", "waits"),
    ("clusters", "at once", "waits"),
    ("clusters", "late", "early"),
    ("warpgroups", "at once", "waits"),
    ("warpgroups", "late", "early"),
]
Attend = Callable[..., tuple[Tensor, Tensor]]

pytestmark = [
    needs_compiler,
    pytest.mark.when_changed(*OPERATORS),
]

POINTERS = (
    *("query", "cache", "pages", "lengths", "query_begins", "k_scale", "v_scale", "sinks"),
    *("out", "lse", "partials", "counters"),
)
STRIDES = ("page_stride", "token_stride", "head_stride", "query_token_stride", "query_head_stride")
SIZES = (
    *("sequences", "kv_heads", "group", "most_queries", "tokens_per_page", "pages_stride"),
    *("window", "least_chunk", "most_splits"),
)


class Problem(ctypes.Structure):
    """problem.h"""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in STRIDES),
        *((name, ctypes.c_uint32) for name in SIZES),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("is_early", ctypes.c_uint32),
        ("most_whole", ctypes.c_uint32),
        ("sharing", ctypes.c_uint32),
        ("blocks_each", ctypes.c_uint32),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = compile_on_the_host("attention.cpp", tmp_path_factory.mktemp("emulator"), e2m1=True)
    assert found.problem_bytes() == ctypes.sizeof(Problem)
    return found


@pytest.fixture(params=FORMS, ids=[" ".join(form) for form in FORMS])
def attend(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Attend:
    def call(
        case: Case,
        *,
        small: bool = False,
        least_chunk: int = 64,
        most_splits: int = 64,
        sharing: int = 8,
    ) -> tuple[Tensor, Tensor]:
        form, speed, order = request.param
        out, lse, problem, kept = problem_of(case, least_chunk, most_splits)
        problem.is_early = order == "early"
        problem.blocks_each = 8 if order == "early" else 1
        problem.most_whole, problem.sharing = max(least_chunk, 64), sharing
        library.attend_on_the_host(
            ctypes.byref(problem),
            case.query.shape[-1],
            case.cache.dtype == FP8,
            small,
            form.encode(),
            case.cache.shape[0],
            BLOCKS,
            speed == "late",
        )
        assert not kept["counters"].any(), "a counter is not zero for the next call"
        return out, lse

    return call


def problem_of(
    case: Case, least_chunk: int, most_splits: int
) -> tuple[Tensor, Tensor, Problem, dict[str, Tensor]]:
    tokens, heads, head_dim = case.query.shape
    sequences, kv_heads = len(case.lengths), case.cache.shape[1]
    group = heads // kv_heads
    most_queries = int(case.query_begins.diff().max())
    row_tiles = -(-group * most_queries // 16)
    rows = min(16, group * most_queries)
    slots = sequences * kv_heads * row_tiles * most_splits
    options = case.options
    kept = {
        "query": case.query,
        "cache": case.cache,
        "pages": case.pages,
        "lengths": case.lengths,
        "query_begins": case.query_begins,
        "out": torch.full((tokens, heads, head_dim), float("nan"), dtype=torch.bfloat16),
        "lse": torch.full((tokens, heads), float("nan")),
        "partials": torch.full((slots * (rows * head_dim + -(-2 * rows // 4) * 4),), float("nan")),
        "counters": torch.zeros(sequences * kv_heads * row_tiles * 16 * 8, dtype=torch.int32),
        **{name: options[name] for name in ("k_scale", "v_scale", "sinks") if name in options},
    }
    size = case.cache.element_size()
    values: dict[str, Any] = {name: tensor.data_ptr() for name, tensor in kept.items()}
    problem = Problem(
        **values,
        page_stride=case.cache.stride(0) * size,
        head_stride=case.cache.stride(1) * size,
        token_stride=case.cache.stride(2) * size,
        query_token_stride=case.query.stride(0),
        query_head_stride=case.query.stride(1),
        sequences=sequences,
        kv_heads=kv_heads,
        group=group,
        most_queries=most_queries,
        tokens_per_page=case.cache.shape[2],
        pages_stride=case.pages.stride(0),
        window=options.get("window", 0),
        least_chunk=least_chunk,
        most_splits=most_splits,
        scale=case.scale,
        soft_cap=options.get("soft_cap", 0.0),
    )
    return kept["out"], kept["lse"], problem, kept


def check(found: tuple[Tensor, Tensor], case: Case) -> None:
    from nibble_kernels.decode_attention.reference import attend as exact

    expected, lse = exact(
        case.query, case.cache, case.pages, case.lengths, case.query_begins, scale=case.scale,
        dtype=torch.float64, **case.options,
    )  # fmt: skip
    assert_close(found[0], expected, case)
    torch.testing.assert_close(found[1].double(), lse, atol=2e-3, rtol=1e-3)


SCALES: dict[str, Any] = {"k_scale": torch.tensor([0.75]), "v_scale": torch.tensor([1.5])}


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_lengths_at_the_edges_of_pages_and_chunks(attend: Attend, head_dim: int, fp8: bool) -> None:
    case = make_case(
        [1, 15, 16, 17, 0, 64, 65, 200], head_dim=head_dim, fp8=fp8, **(SCALES if fp8 else {})
    )
    check(attend(case), case)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_every_option(attend: Attend, fp8: bool) -> None:
    """Speculative queries, some of none; a window, capped scores, sinks; larger pages."""
    options: dict[str, Any] = {
        "window": 70,
        "soft_cap": 5.0,
        "sinks": torch.randn(12) * 3,
        **(SCALES if fp8 else {}),
    }
    case = make_case(
        [150, 3, 81, 0],
        group=6,
        queries=[3, 3, 1, 0],
        page=48,
        heads_first=True,
        fp8=fp8,
        **options,
    )
    check(attend(case), case)


@pytest.mark.parametrize(
    ("head_dim", "group", "queries"), [(128, 1, 1), (64, 16, 2), (256, 8, 2), (128, 5, 8)]
)
def test_groups_and_speculative_queries(
    attend: Attend, head_dim: int, group: int, queries: int
) -> None:
    case = make_case(
        [90, 40], head_dim=head_dim, kv_heads=1, group=group, queries=queries, fp8=True
    )
    check(attend(case), case)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_the_forms_for_99_kilobytes(attend: Attend, head_dim: int, fp8: bool) -> None:
    case = make_case([130, 33], head_dim=head_dim, fp8=fp8)
    check(attend(case, small=True), case)


def test_few_chunks_hold_a_long_sequence(attend: Attend) -> None:
    case = make_case([700], kv_heads=1, fp8=True)
    check(attend(case, least_chunk=64, most_splits=3), case)


def test_short_and_long_sequences_with_as_many_splits_as_there_are(attend: Attend) -> None:
    """Of the long ones, blocks have 128 splits of two tiles and 66 of them, clusters 128 splits,
    some of one tile.
    """
    case = make_case([40, 4090, 0, 17, 2100, 64], kv_heads=1, fp8=True)
    check(attend(case, least_chunk=16, most_splits=128, sharing=1000), case)


def test_clusters_share_long_sequences_of_more_kv_heads_than_clusters(attend: Attend) -> None:
    """And of fewer, with more tiles than a lane looks up at a time."""
    many = make_case([300, 70, 500], kv_heads=6)
    check(attend(many, sharing=4), many)
    few = make_case([9000, 70], kv_heads=2, fp8=True)
    check(attend(few, sharing=5), few)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_more_than_eight_rows_of_a_long_sequence_in_the_forms_for_99_kilobytes(
    attend: Attend, head_dim: int, fp8: bool
) -> None:
    case = make_case([700, 30], head_dim=head_dim, kv_heads=1, group=6, queries=2, fp8=fp8)
    check(attend(case, small=True, least_chunk=16), case)


@pytest.mark.parametrize(
    ("length", "tokens", "splits"),
    [
        (1024, 128, 8),
        (1025, 128, 9),
        (4096, 128, 32),
        (6000, 192, 32),
        (8192, 256, 32),
        (8193, 256, 33),
        (16384, 256, 64),
        (32768, 512, 64),
    ],
)
def test_longer_sequences_have_larger_splits(
    library: ctypes.CDLL, length: int, tokens: int, splits: int
) -> None:
    found = (ctypes.c_uint32 * 2)()
    problem = Problem(least_chunk=128, most_splits=64)
    library.divide(ctypes.byref(problem), length, 8, found)
    assert tuple(found) == (tokens, splits)


@pytest.mark.parametrize(
    ("length", "kv_heads", "sharing", "splits"),
    [
        (0, 8, 25, 1),
        (3072, 8, 25, 1),
        (3073, 8, 25, 3),
        (131072, 8, 25, 3),
        (131072, 4, 25, 6),
        (131072, 1, 25, 25),
        (131072, 1, 100, 64),
        (131072, 32, 25, 1),
    ],
)
def test_clusters_take_a_whole_number_of_splits_of_each_kv_head(
    library: ctypes.CDLL, length: int, kv_heads: int, sharing: int, splits: int
) -> None:
    """Splits cover the tiles once, and differ by a tile at most."""
    problem = Problem(
        kv_heads=kv_heads, group=4, most_queries=1, most_splits=64, most_whole=3072, sharing=sharing
    )
    begins = (ctypes.c_uint32 * 65)()
    assert library.divide_for_clusters(ctypes.byref(problem), length, begins) == splits
    tiles = -(-length // 16)
    assert (begins[0], begins[splits]) == (0, tiles)
    sizes = [begins[i + 1] - begins[i] for i in range(splits)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("kv_heads", "sequences", "length", "splits"),
    [
        *((8, 4, length, splits) for length, splits in ((512, 1), (513, 3), (1024, 4), (2048, 4))),
        *((8, 3, length, splits) for length, splits in ((1024, 4), (8192, 8), (131072, 16))),
        *((8, 5, length, splits) for length, splits in ((1024, 1), (1040, 2), (8192, 8))),
        *((2, 1, length, splits) for length, splits in ((256, 1), (257, 5), (512, 8), (1024, 16))),
        *((2, 1, length, splits) for length, splits in ((8192, 32), (131072, 32))),
        *((2, 8, length, splits) for length, splits in ((512, 8), (1024, 8), (8192, 32))),
        *((2, 32, length, splits) for length, splits in ((512, 1), (1024, 4), (8192, 32))),
    ],
)
def test_warpgroups_have_more_splits_in_a_batch_of_few_sequences(
    library: ctypes.CDLL, kv_heads: int, sequences: int, length: int, splits: int
) -> None:
    """Up to 1, 2, 4, 8, … of them."""
    problem = Problem(kv_heads=kv_heads, group=4, most_queries=1, least_chunk=128, most_splits=64)
    assert library.divide_for_warpgroups(ctypes.byref(problem), length, sequences) == splits


def test_a_result_does_not_depend_on_the_rest_of_the_batch(attend: Attend) -> None:
    case = make_case([200, 37, 129], fp8=True)
    together = attend(case)
    for i in range(3):
        assert torch.equal(attend(case.part(i))[0][0], together[0][i])


def test_large_and_small_queries_keep_their_range(attend: Attend) -> None:
    case = make_case([60, 60, 60], fp8=True)
    case.query *= torch.tensor([1e30, 1.0, 1e-30])[:, None, None]
    case.scale = 1e-31
    check(attend(case), case)


def test_pages_before_the_window_are_not_read(attend: Attend) -> None:
    """A sliding window's manager releases them: other sequences' pages, or NaN."""
    case = make_case([300, 170], kv_heads=1, fp8=True, window=40)
    case.pages[0, : (300 - 40) // 16] = case.cache.shape[0] - 1
    raw = case.cache.view(torch.uint8)
    raw[-1] = 0x7F
    before = (300 - 40) % 16
    raw[case.pages[0, (300 - 40) // 16], :, :before] = 0x7F
    check(attend(case), case)
