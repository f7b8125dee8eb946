"""Full CUDA graphs for steps with prompts, in vLLM's own manager of graphs. CUDA graphs
themselves need a GPU: benchmarks/step_graph_equality.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import setuptools  # noqa: F401  # torch needs it; it fails to load where a test has imported pip
import torch

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = [1, 2, 4, 8, 16, 24, 32]


def manager_of(monkeypatch: pytest.MonkeyPatch, drafts: int = 0, requests: int = 8) -> Any:
    """vLLM's manager with SIZES, as if all of its graphs were captured."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import cudagraph_utils

    monkeypatch.setattr(
        cudagraph_utils,
        "get_pp_group",
        lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True),
    )
    monkeypatch.setattr(
        type(current_platform), "get_global_graph_pool", lambda self: None,
        raising=False,
    )  # fmt: skip
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=SIZES, max_cudagraph_capture_size=SIZES[-1]
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        speculative_config=None,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    manager = cudagraph_utils.ModelCudaGraphManager(
        config, torch.device("cpu"), CUDAGraphMode.FULL_AND_PIECEWISE, 1 + drafts
    )
    manager._graphs_captured = True
    return manager


@pytest.mark.parametrize("drafts", [0, 3])
def test_every_batch_of_prompts_with_a_piecewise_graph_has_a_full_one(
    monkeypatch: pytest.MonkeyPatch, drafts: int
) -> None:
    from nibble.engine.plugin.step_graph.prompts import is_for_prompts, take_full_graphs

    stock, nibbles = (manager_of(monkeypatch, drafts) for _ in range(2))
    take_full_graphs(nibbles)
    for tokens in range(1, SIZES[-1] + 2):
        for requests in range(1, min(tokens, 8) + 1):
            batch = (requests, tokens, None, 0)
            before, now = stock.dispatch(*batch), nibbles.dispatch(*batch)
            assert now.num_tokens == before.num_tokens
            if before.cg_mode.name == "NONE":
                assert now == before
                continue
            assert before.cg_mode.name == "PIECEWISE" and is_for_prompts(now)
            assert requests <= now.num_reqs <= 8


@pytest.mark.parametrize("drafts", [0, 3])
def test_decode_steps_keep_their_graphs(monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    from nibble.engine.plugin.step_graph.prompts import is_for_prompts, take_full_graphs

    stock, nibbles = (manager_of(monkeypatch, drafts) for _ in range(2))
    take_full_graphs(nibbles)
    each = 1 + drafts
    for requests in range(1, 9):
        batch = (requests, requests * each, each, 0, each)
        before = stock.dispatch(*batch)
        if before.cg_mode.name == "FULL":
            assert nibbles.dispatch(*batch) == before and not is_for_prompts(before)


def test_the_largest_graphs_are_captured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is then enough for the others, and vLLM estimates from them what all take."""
    from vllm.config.compilation import CUDAGraphMode

    from nibble.engine.plugin.step_graph.prompts import take_full_graphs

    manager = manager_of(monkeypatch)
    before = len(manager._capture_descs[CUDAGraphMode.FULL])
    take_full_graphs(manager)
    assert CUDAGraphMode.PIECEWISE not in manager._capture_descs  # no step would use them
    descs = manager._capture_descs[CUDAGraphMode.FULL]
    assert len(set(descs)) == len(descs) == before + len(SIZES)
    assert [one.num_tokens for one in descs] == sorted(
        (one.num_tokens for one in descs), reverse=True
    )


def test_prompts_beyond_vllms_sizes_have_graphs_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nibble.engine.plugin.step_graph.prompts import is_for_prompts, take_full_graphs

    manager = manager_of(monkeypatch)
    take_full_graphs(manager, [40, 64])
    found = [manager.dispatch(3, tokens, None, 0) for tokens in (32, 33, 40, 41, 64)]
    assert [one.num_tokens for one in found] == [32, 40, 40, 64, 64]
    assert all(is_for_prompts(one) and one.num_reqs == 8 for one in found)
    assert manager.dispatch(3, 65, None, 0).cg_mode.name == "NONE"
    assert manager.dispatch(8, 8, 1, 0).uniform_token_count == 1  # a decode step


def test_graphs_of_long_prompts_have_no_more_requests_than_vllms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nibble.engine.plugin.step_graph.prompts import take_full_graphs

    manager = manager_of(monkeypatch, requests=100)
    take_full_graphs(manager, [40, 64])
    assert manager.dispatch(32, 50, None, 0).num_reqs == SIZES[-1] == 32
    assert manager.dispatch(33, 50, None, 0).cg_mode.name == "NONE"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("largest", "most_tokens", "expected"),
    [(512, 8192, 2048), (512, 1000, 960), (512, 512, 0), (64, 8192, 0)],
)
def test_long_sizes_need_vllms_default_and_a_batch_so_long(
    largest: int, most_tokens: int, expected: int
) -> None:
    from nibble.engine.plugin.step_graph.prompts import plan_long_prompts

    config = SimpleNamespace(max_cudagraph_capture_size=largest)
    runner = engine(compilation_config=config, max_num_tokens=most_tokens)
    builder = runner.attn_groups[0][0].get_metadata_builder(0)
    builder.longest_graph = 0
    assert max(plan_long_prompts(runner), default=0) == builder.longest_graph == expected


@pytest.mark.usefixtures("hopper")
def test_vllms_attention_has_no_long_sizes() -> None:
    from nibble.engine.plugin.step_graph.prompts import plan_long_prompts

    groups = [[SimpleNamespace(get_metadata_builder=lambda _: "FlashAttention")]]
    config = SimpleNamespace(max_cudagraph_capture_size=512)
    runner = engine(attn_groups=groups, compilation_config=config, max_num_tokens=8192)
    assert plan_long_prompts(runner) == []


def test_attention_is_planned_for_the_captured_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch of short prompts must not be planned as a decode step: the graph has another
    kernel.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from nibble.engine.plugin.step_graph.runner import StepGraphRunner

    monkeypatch.setattr(
        GPUModelRunner, "prepare_inputs", lambda *_: SimpleNamespace(max_query_len=None)
    )
    runner = StepGraphRunner.__new__(StepGraphRunner)
    full, piecewise, decode = (
        BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 8),
        BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 8, None),
        BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 8, uniform_token_count=1),
    )
    found = [runner.prepare_inputs(None, None, desc, 0) for desc in (full, piecewise, decode)]
    assert [one.max_query_len for one in found] == [8, None, None]


def engine(**changes: Any) -> Any:
    """A runner with what graphs for prompts depend on."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    from nibble.engine.plugin.attention.backend import CutePagedMetadataBuilder

    builder: Any = CutePagedMetadataBuilder.__new__(CutePagedMetadataBuilder)
    builder.kv_cache_dtype = changes.pop("cache", torch.bfloat16)
    group = SimpleNamespace(get_metadata_builder=lambda _: builder)
    facts: dict[str, Any] = {
        "num_speculative_steps": 0,
        "vllm_config": SimpleNamespace(kv_transfer_config=None),
        "fast_prefill": None,
        "parallel_config": SimpleNamespace(
            world_size_across_dp=1, tensor_parallel_size=1, enable_eplb=False
        ),
        "cudagraph_manager": SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
        "attn_groups": [[group]],
        "use_dcp": False,
        "pcp_manager": None,
        "lora_config": None,
        "uses_inputs_embeds": False,
        "is_pooling_model": False,
        "model_state": DefaultModelState.__new__(DefaultModelState),
        "aux_output_connector": None,
        "ubatch_runner": None,
        "model_config": SimpleNamespace(rswa_window=None),
    }
    return SimpleNamespace(**(facts | changes))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 3, and a model whose layers see all tokens."""
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    from nibble.engine.plugin.step_graph import prompts

    monkeypatch.setattr(
        FlashAttentionMetadataBuilder, "_cudagraph_support", AttentionCGSupport.ALWAYS
    )
    monkeypatch.setattr(prompts, "_get_sliding_window_configs", lambda _: {(-1, -1)})


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({}, ""),
        ({"lora_config": "adapters"}, "adapters"),
        ({"num_speculative_steps": 3}, "drafts"),
        ({"cache": torch.float8_e4m3fn}, "another cache than BF16"),
        ({"model_state": "linear attention"}, "a model with other state"),
        ({"uses_inputs_embeds": True}, "inputs as embeddings"),
        (
            {"cudagraph_manager": SimpleNamespace(cudagraph_mode="FULL_DECODE_ONLY")},
            "another CUDA graph mode",
        ),
        (
            {"attn_groups": [[SimpleNamespace(get_metadata_builder=lambda _: "Triton")]]},
            "another attention backend",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_engine_has_graphs_for_prompts_unless_something_rules_them_out(
    changes: dict[str, Any], refusal: str
) -> None:
    from nibble.engine.plugin.step_graph.prompts import refusal_of_prompts

    assert refusal_of_prompts(engine(**changes)) == refusal


@pytest.mark.usefixtures("hopper")
def test_with_a_sliding_window_prompts_keep_piecewise_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FlashAttention 3 compares it with the longest request, which a graph would fix."""
    from nibble.engine.plugin.step_graph import prompts

    monkeypatch.setattr(prompts, "_get_sliding_window_configs", lambda _: {(-1, -1), (127, 0)})
    assert prompts.refusal_of_prompts(engine()) == "sliding windows"
