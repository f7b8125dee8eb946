"""The backend CUTE_PAGED: which batches nibble's kernel computes, with vLLM's classes and without a
GPU. The operator runs as plain torch code here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import setuptools  # noqa: F401  # torch needs it; it fails to load where a test has imported pip
import torch

from nibble.engine.contract import ATTENTION
from nibble.engine.decode_attention import FEW

pytestmark = pytest.mark.filterwarnings("ignore")

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16


def config(**changes: Any) -> Any:
    options: dict[str, Any] = {"drafts": 0, "ubatching": False, "rswa": None, "prefix": False}
    options |= {"kernel": "nibble", "connector": None} | changes
    drafts = options["drafts"]
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
        parallel_config=SimpleNamespace(
            use_ubatching=options["ubatching"], decode_context_parallel_size=1
        ),
        additional_config={"nibble": {"attention_kernel": options["kernel"]}},
        kv_transfer_config=options["connector"],
        model_config=SimpleNamespace(
            rswa_window=options["rswa"], is_mm_prefix_lm=options["prefix"], dtype=torch.bfloat16
        ),
    )


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.attention.backends import flash_attn

    from nibble.engine.plugin.attention import backend, workspace

    monkeypatch.setattr(flash_attn, "flash_attn_supports_kv_cache_dtype", lambda *a, **k: True)
    monkeypatch.setattr(workspace, "_workspaces", {})
    monkeypatch.setattr(workspace, "_warm", set())
    monkeypatch.setattr(backend, "get_current_vllm_config_or_none", config)
    return backend


def layer_of(backend: Any, cache: str = "auto", dtype: Any = torch.bfloat16, **options: Any) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        sizes = {"num_heads": HEADS, "head_size": DIM, "num_kv_heads": KV_HEADS, "scale": 0.125}
        sizes |= {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": cache}
        impl = backend.CutePagedImpl(**(sizes | options))
    finally:
        torch.set_default_dtype(before)
    one = torch.tensor(1.0)
    return SimpleNamespace(impl=impl, _q_scale=one, _k_scale=one * 0.5, _v_scale=one * 2)


def builder_of(backend: Any, layer: Any, drafts: int = 0, few: int = 8) -> Any:
    made = backend.CutePagedMetadataBuilder.__new__(backend.CutePagedMetadataBuilder)
    made.aot_schedule, made.aot_sliding_window, made.vllm_config = True, (-1, -1), None
    made.use_full_cuda_graph, made.max_cudagraph_size, made.max_num_splits = True, 8, 32
    made.dcp_world_size, made.rswa_window, made.mm_prefix_query_ranges_np = 1, None, None
    made.device = torch.device("cpu")
    made.scheduler_metadata = torch.ones(33, dtype=torch.int32)
    made._is_decode_batch, made.longest_graph = False, 0
    made.refusal, made.most_queries = backend._refusal(layer), 1 + drafts
    made.most_requests, made.leaves_many, made.is_early = few, few < 8, True
    return made


def batch(lengths: list[int], queries: list[int], **changes: Any) -> Any:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *queries]).cumsum(0).int()
    values = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": torch.tensor(lengths).int(),
        "num_reqs": len(lengths),
        "num_actual_tokens": sum(queries),
        "max_query_len": max(queries),
        "max_seq_len": max(lengths),
        "block_table_tensor": torch.arange(2 * len(lengths)).int().view(len(lengths), 2),
        "slot_mapping": torch.zeros(sum(queries), dtype=torch.int64),
    }
    return CommonAttentionMetadata(**(values | changes))


def test_the_installed_vllm_has_what_the_backend_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import registry

    from nibble.engine.plugin.attention import follow
    from nibble.engine.plugin.attention.backend import CutePagedBackend

    names: Any = registry.AttentionBackendEnum
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", dict(registry._ATTN_OVERRIDES))
    monkeypatch.setattr(names, "_member_map_", dict(names._member_map_))
    monkeypatch.setattr(names, "_value2member_map_", dict(names._value2member_map_))
    monkeypatch.setattr(names, "_member_names_", [*names._member_names_])
    follow.register.__wrapped__()
    assert names.FLASH_ATTN.get_class() is CutePagedBackend
    assert names[CutePagedBackend.get_name()].get_class() is CutePagedBackend
    type.__delattr__(names, ATTENTION)


def test_a_batch_of_decode_steps_needs_no_schedule_and_others_do(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    schedule = torch.full((5,), 7, dtype=torch.int32)
    monkeypatch.setattr(
        FlashAttentionMetadataBuilder, "_get_scheduler_metadata", lambda self, **_: schedule
    )
    layer = layer_of(backend)
    layer.impl.process_weights_after_loading(torch.bfloat16)
    builder = builder_of(backend, layer)
    counters = backend.workspace_of(builder.device).counters
    counters.fill_(3)
    built = builder.build(0, batch([7, 20], [1, 1]))
    assert built.decodes and built.scheduler_metadata is None and not counters.any()
    built = builder.build(0, batch([7, 20], [1, 3]))
    assert not built.decodes and built.scheduler_metadata.tolist() == [7] * 5
    assert not builder.build(0, batch([7, 20], [1, 1], causal=False)).decodes
    assert builder_of(backend, layer, drafts=3).build(0, batch([7, 20], [4, 2])).decodes
    assert not builder.plans_on_host


def test_graphs_of_long_prompts_have_one_part_of_a_row(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention would choose parts by the batch, and a graph has room for those of another."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    asked: list[int] = []
    monkeypatch.setattr(
        FlashAttentionMetadataBuilder,
        "_get_scheduler_metadata",
        lambda self, **options: asked.append(options["max_num_splits"]),
    )
    layer = layer_of(backend)
    layer.impl.process_weights_after_loading(torch.bfloat16)
    builder = builder_of(backend, layer)
    builder.longest_graph = 30
    found = [builder.build(0, batch([40], [size])).max_num_splits for size in (8, 9, 30, 31)]
    assert found == asked == [32, 1, 1, 0]


def test_flash_attention_plans_for_more_than_few_requests(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the number of requests of a step with its padded ones, which a CUDA graph keeps."""
    from nibble_kernels.decode_attention import MOST_CLUSTERED
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    assert FEW <= MOST_CLUSTERED
    schedule = torch.full((5,), 7, dtype=torch.int32)
    monkeypatch.setattr(
        FlashAttentionMetadataBuilder, "_get_scheduler_metadata", lambda self, **_: schedule
    )
    monkeypatch.setattr(backend, "get_current_vllm_config_or_none", lambda: config(kernel="few"))
    layer = layer_of(backend)
    layer.impl.process_weights_after_loading(torch.bfloat16)
    builder = builder_of(backend, layer, few=FEW)
    few = builder.build(0, batch([20] * FEW, [1] * FEW))
    assert few.decodes and few.scheduler_metadata is None
    many = builder.build(0, batch([7, 20, 9, 5, 0], [1, 1, 1, 1, 0]))
    assert not many.decodes and many.scheduler_metadata.tolist() == [7] * 5
    whole = backend._most_requests(config())
    assert (backend._most_requests(config(kernel="few")), whole) == (FEW, 8)


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_decode_steps_are_computed_from_the_cache(backend: Any, cache: str) -> None:
    from nibble_kernels.decode_attention.reference import attend

    layer = layer_of(backend, cache, logits_soft_cap=5.0, sliding_window=9)
    layer.impl.process_weights_after_loading(torch.bfloat16)
    builder = builder_of(backend, layer, drafts=1)
    metadata = builder.build(0, batch([7, 20, 0], [1, 2, 0]))
    stored = torch.randn(6, KV_HEADS, PAGE, 2 * DIM)
    stored = stored.to(torch.float8_e4m3fn if cache == "fp8" else torch.bfloat16)
    # A row of qkv, of which the queries are the first part, and a padded row.
    query = torch.randn(4, HEADS + 2 * KV_HEADS, DIM).bfloat16()[:, :HEADS]
    output = torch.full((4, HEADS, DIM), 99.0).bfloat16()
    raw = stored.view(torch.uint8) if cache == "fp8" else stored
    layer.impl.forward(layer, query, None, None, raw, metadata, output)
    scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale} if cache == "fp8" else {}
    expected, _ = attend(
        query[:3], stored, metadata.block_table, metadata.seq_lens, metadata.query_start_loc,
        scale=0.125, window=9, soft_cap=5.0, **scales,
    )  # fmt: skip
    torch.testing.assert_close(output[:3].float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_prompts_take_flash_attention_with_rounded_queries(
    backend: Any, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    seen: list[Any] = []
    monkeypatch.setattr(
        FlashAttentionImpl, "forward", lambda self, layer, query, *rest: seen.append(query)
    )
    monkeypatch.setattr(
        backend,
        "scaled_fp8_quant",
        lambda x, scale, group_shape: (x.to(torch.float8_e4m3fn), scale),
    )
    layer = layer_of(backend, cache)
    # While vLLM builds the layer, which then leaves queries as they are.
    assert layer.impl.supports_quant_query_input is (cache == "auto")
    layer.impl.process_weights_after_loading(torch.bfloat16)
    assert layer.impl.supports_quant_query_input
    query = torch.randn(9, HEADS, DIM).bfloat16()
    metadata = backend.CutePagedMetadata(
        **{**vars(builder_of(backend, layer).build(0, batch([9], [1]))), "decodes": False}
    )
    layer.impl.forward(layer, query, None, None, None, metadata, query.clone())
    layer.impl.forward(layer, query, None, None, None, None, query.clone())  # to measure memory
    of_prompt, of_profile = seen
    assert of_profile is query
    assert of_prompt.dtype == (torch.float8_e4m3fn if cache == "fp8" else torch.bfloat16)
    assert of_prompt.shape == query.shape


@pytest.mark.parametrize(
    ("options", "settings", "why"),
    [
        ({"head_size": 96}, {}, "head dim is 96"),
        ({"num_heads": 64}, {}, "more than 16"),
        ({"alibi_slopes": [1.0] * 4}, {}, "ALiBi"),
        ({"dtype": torch.float16}, {}, "float16"),
        ({"attn_type": "encoder_only"}, {}, "encoder_only"),
        ({}, {"drafts": 8}, "8 tokens are drafted"),
        ({}, {"ubatching": True}, "microbatches"),
        ({}, {"prefix": True}, "more or less"),
        ({}, {"rswa": 128}, "more or less"),
    ],
)
def test_other_layers_and_engines_keep_flash_attention(
    backend: Any,
    options: dict[str, Any],
    settings: dict[str, Any],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nibble.engine.plugin.report.kernels_used import attention_name

    monkeypatch.setattr(backend, "get_current_vllm_config_or_none", lambda: config(**settings))
    layer = layer_of(backend, **options)
    layer.impl.process_weights_after_loading(torch.bfloat16)
    assert why in layer.impl.refusal
    builder = builder_of(backend, layer)
    builder.aot_schedule = False
    assert not builder.build(0, batch([7], [1])).decodes
    layer.get_attn_backend = lambda: backend.CutePagedBackend
    assert attention_name(layer) == "FLASH_ATTN"


def test_the_report_names_the_backend(backend: Any) -> None:
    from nibble.engine.plugin.report.kernels_used import attention_name

    layer = layer_of(backend)
    layer.get_attn_backend = lambda: backend.CutePagedBackend
    assert attention_name(layer) == ATTENTION


def test_scales_of_heads_are_refused_after_the_load(backend: Any) -> None:
    layer = layer_of(backend, "fp8")
    layer._k_scale = torch.ones(KV_HEADS)
    assert "own scale" in backend._refusal(layer)


def test_steps_from_graphs_take_the_builder(backend: Any) -> None:
    from nibble.engine.plugin.step_graph.facts import _is_planned_on_device

    ours, refused, few = (builder_of(backend, layer_of(backend), few=n) for n in (8, 8, FEW))
    refused.refusal = "another head dim"
    for builder in (ours, refused, few):
        builder.aot_sliding_window = (127, 0)
        assert _is_planned_on_device(builder) is (builder is ours)
        builder.aot_sliding_window = (-1, -1)
        assert _is_planned_on_device(builder)


def test_layers_share_a_workspace_that_is_large_enough_for_each(backend: Any) -> None:
    from nibble.engine.decode_attention import AttentionShape
    from nibble.engine.plugin.attention.workspace import reserve, workspace_of

    cpu = torch.device("cpu")
    small, large = AttentionShape(64, 64, 4, 2, "auto"), AttentionShape(256, 256, 16, 2, "auto")
    reserve(small, 8, 1, cpu)
    first = workspace_of(cpu)
    reserve(large, 8, 1, cpu)
    second = workspace_of(cpu)
    assert second.partials.numel() > first.partials.numel()
    reserve(small, 4, 2, cpu)
    assert workspace_of(cpu) is second


def test_a_worker_with_the_option_gets_the_backend_before_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from nibble.engine.plugin.attention import follow
    from nibble.engine.plugin.require import required

    done: list[str] = []

    def init_device(self: Any) -> None:
        done.append("device")

    monkeypatch.setattr(WorkerWrapperBase, "init_device", init_device)
    monkeypatch.setattr(follow, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(follow, "require_kernel", lambda: done.append("kernel"))
    monkeypatch.setattr(follow, "register", lambda: done.append("backend"))
    follow.offer_attention()
    create = required(WorkerWrapperBase, "init_device", "self")  # as the next part replaces it
    for value in ("vllm", "nibble", "few"):
        options = {"nibble": {"attention_kernel": value}}
        create(SimpleNamespace(vllm_config=SimpleNamespace(additional_config=options)))
    assert done == ["device", *["kernel", "backend", "device"] * 2]
