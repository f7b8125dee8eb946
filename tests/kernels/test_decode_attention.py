"""nibble::decode_attention against float64: the specification everywhere, the kernel on a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels.attention_cases import Case, assert_close, make_case

# All batches are of blocks, of warpgroups, or of clusters, where there is such a kernel.
FORMS: dict[str, dict[str, Any]] = {
    "blocks": {"most_clustered": 0, "warpgroups": False},
    "warpgroups": {"most_clustered": 0},
    "clusters": {"most_clustered": 1000},
}
SCALES: dict[str, Any] = {"k_scale": torch.tensor([0.75]), "v_scale": torch.tensor([1.5])}


def attend(case: Case, lse: Tensor | None = None, early: bool = False, **options: Any) -> Tensor:
    from nibble_kernels.decode_attention import decode_attention, make_workspace

    _, heads, head_dim = case.query.shape
    kv_heads, most = case.cache.shape[1], int(case.query_begins.diff().max())
    workspace = make_workspace(
        len(case.lengths), kv_heads, heads // kv_heads, head_dim,
        most_queries=most, device=case.query.device, **options,
    )  # fmt: skip
    return decode_attention(
        case.query, case.cache, case.pages, case.lengths, case.query_begins, workspace,
        most_queries=most, scale=case.scale, lse=lse, early=early, **case.options,
    )  # fmt: skip


def exact(case: Case) -> Tensor:
    from nibble_kernels.decode_attention.reference import attend as specified

    return specified(
        case.query, case.cache, case.pages, case.lengths, case.query_begins, scale=case.scale,
        dtype=torch.float64, **case.options,
    )[0]  # fmt: skip


def cases() -> list[Case]:
    made = []
    for head_dim in (64, 128, 256):
        for fp8 in (False, True):
            scales: dict[str, Any] = SCALES if fp8 else {}
            form: dict[str, Any] = {"head_dim": head_dim, "fp8": fp8}
            for heads_first in (False, True):
                lengths = [1, 15, 16, 17, 0, 64, 65, 200, 1000]
                made.append(make_case(lengths, heads_first=heads_first, **form, **scales))
            masks: dict[str, Any] = {"window": 70, "soft_cap": 5.0, "sinks": torch.randn(12) * 3}
            some: dict[str, Any] = {"group": 6, "queries": [3, 3, 1, 0], "page": 48}
            made.append(make_case([150, 3, 81, 0], **form, **some, **masks))
            made.append(make_case([700, 33], group=16, kv_heads=1, queries=4, **form))
            made.append(make_case([513] * 3, group=1, kv_heads=8, **form))
    return made


def test_the_plain_torch_code_is_the_specification(kernels: ModuleType) -> None:
    case = make_case([33, 0, 7], fp8=True, window=20, queries=2, sinks=torch.randn(8), **SCALES)
    found = attend(case)
    assert_close(found, exact(case), case)
    assert not found[2:4].any()


@pytest.mark.gpu
def test_the_kernel_is_within_its_roundings(kernels: ModuleType) -> None:
    for case in cases():
        here = case.on("cuda")
        expected = exact(here).cpu()
        for form, chunk, early in itertools.product(FORMS.values(), (16, 64, 512), (False, True)):
            found = attend(here, early=early, least_chunk=chunk, **form)
            assert_close(found, expected, case)


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", [3, 8])
@pytest.mark.parametrize("form", FORMS)
def test_a_hundred_replays_are_equal(kernels: ModuleType, form: str, sequences: int) -> None:
    from nibble_kernels.decode_attention import decode_attention, make_workspace

    lengths = [5000, 17, 999, 0, 3000, 64, 8000, 1][:sequences]
    case = make_case(lengths, kv_heads=8, fp8=True).on("cuda")
    workspace = make_workspace(8, 8, 4, 128, **FORMS[form])

    def call() -> Tensor:
        return decode_attention(
            case.query, case.cache, case.pages, case.lengths, case.query_begins, workspace,
            scale=case.scale, early=True,
        )  # fmt: skip

    first, graph = call(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = call()
    for _ in range(100):
        again.fill_(float("nan"))
        graph.replay()
        assert torch.equal(again, first)
    assert not workspace.counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_a_result_does_not_depend_on_its_batch(kernels: ModuleType, form: str) -> None:
    """Also not on the parts of a batch that is larger than a launch. With warpgroups it depends on
    the number of sequences: up to 4, 8, …
    """
    case = make_case([n % 700 for n in range(0, 300 * 37, 37)], kv_heads=1, fp8=True).on("cuda")
    together = attend(case, **FORMS[form], least_chunk=16)
    for i in (0, 5, 255, 256, 299):
        lengths = torch.ones_like(case.lengths)
        lengths[i] = case.lengths[i]
        among_others = attend(replace(case, lengths=lengths), **FORMS[form], least_chunk=16)
        assert torch.equal(among_others[i], together[i])
        if form != "warpgroups":
            alone = attend(case.part(i), **FORMS[form], least_chunk=16)
            assert torch.equal(alone[0], together[i])
    three, four = (attend(case.part(15, n), **FORMS[form], least_chunk=16) for n in (3, 4))
    assert torch.equal(three, four[:3])


@pytest.mark.gpu
@pytest.mark.parametrize(("sequences", "form"), [(2, "clusters"), (3, "warpgroups")])
def test_clusters_compute_batches_of_few_sequences(
    kernels: ModuleType, sequences: int, form: str
) -> None:
    """Padded ones count. There is no kernel of clusters for head dim 256, and for more than 8 rows
    with 128, and none of warpgroups for head dim 64.
    """
    other = "warpgroups" if form == "clusters" else "clusters"
    case = make_case([3000, 17, 0][:sequences], kv_heads=2).on("cuda")
    assert torch.equal(attend(case), attend(case, **FORMS[form]))
    assert not torch.equal(attend(case), attend(case, **FORMS[other]))
    options: dict[str, Any]
    for options in ({"head_dim": 256}, {"group": 16}):
        wide = make_case([3000] * sequences, kv_heads=1, **options).on("cuda")
        assert torch.equal(attend(wide), attend(wide, **FORMS["warpgroups"]))
    narrow = make_case([3000] * 5, kv_heads=1, head_dim=64).on("cuda")
    assert torch.equal(attend(narrow), attend(narrow, **FORMS["blocks"]))


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", ["page", "type"])
def test_what_the_kernel_cannot_read_is_refused(kernels: ModuleType, wrong: str) -> None:
    case = make_case([40]).on("cuda")
    case.cache = case.cache[:, :, :8] if wrong == "page" else case.cache.to(torch.float16)
    expected = "multiple of 16 tokens" if wrong == "page" else "bfloat16 or float8"
    with pytest.raises(RuntimeError, match=expected):
        attend(case)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_lengths_at_the_edges_of_the_division(
    kernels: ModuleType, head_dim: int, fp8: bool
) -> None:
    lengths = [1024, 1025, 4096, 4097, 6000, 8192, 8193, 16384, 16400]
    case = make_case(lengths, head_dim=head_dim, kv_heads=2, fp8=fp8)
    here = case.on("cuda")
    expected = exact(here).cpu()
    for form in FORMS:
        assert_close(attend(here, **FORMS[form]), expected, case)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_a_small_workspace_takes_several_launches(kernels: ModuleType, form: str) -> None:
    from nibble_kernels.decode_attention import decode_attention, make_workspace

    case = make_case([3000, 17, 0, 2000, 1500, 64, 1800], kv_heads=2, fp8=True).on("cuda")
    found = [
        decode_attention(
            case.query, case.cache, case.pages, case.lengths, case.query_begins,
            make_workspace(
                sequences, 2, case.query.shape[1] // 2, case.query.shape[2], **FORMS[form]
            ),
            scale=case.scale,
        )
        for sequences in (7, 2, 1)
    ]  # fmt: skip
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
