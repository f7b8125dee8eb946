"""The step graph's parts that use vLLM's classes: the runner's decisions, the scheduler's shortcut,
the check of vLLM's files. CUDA graphs themselves need a GPU: benchmarks/step_graph_equality.py.
"""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import setuptools  # noqa: F401  # torch needs it; it fails to load where a test has imported pip
import torch

from nibble.engine.plugin.require import VllmMismatch
from tests.unit.test_step_graph import schedule, tables

pytestmark = pytest.mark.filterwarnings("ignore")


# --- vLLM's files ---------------------------------------------------------------------------------


def test_the_installed_vllm_is_the_one_that_the_graphs_repeat() -> None:
    from nibble.engine.plugin.step_graph import probe

    probe.check_source(probe.RUNNER_SOURCES)
    probe.check_source(probe.SCHEDULER_SOURCES)


@pytest.mark.parametrize("module", ["vllm.v1.core.sched.output", "vllm.v1.gone"])
def test_a_file_that_differs_is_named(module: str) -> None:
    from nibble.engine.plugin.step_graph.probe import check_source

    with pytest.raises(VllmMismatch, match=rf"^{module} of vLLM .* differs from vLLM 0\.32\.0$"):
        check_source({module: "0123456789abcdef"})


def test_another_vllm_keeps_its_runner_and_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.v1.worker.gpu import model_runner

    from nibble.engine.plugin.step_graph import follow, probe

    monkeypatch.setattr(follow.logger, "propagate", True)
    monkeypatch.setitem(probe.RUNNER_SOURCES, "vllm.v1.worker.gpu.states", "0")
    before = model_runner.GPUModelRunner
    with caplog.at_level(logging.WARNING, follow.logger.name):
        follow.replace_runner.__wrapped__()
    assert model_runner.GPUModelRunner is before
    (line,) = [record.getMessage() for record in caplog.records]
    assert "take vLLM's path: vllm.v1.worker.gpu.states of vLLM" in line and "\n" not in line


def test_the_same_vllm_gets_nibbles_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu import model_runner

    from nibble.engine.plugin.step_graph import follow
    from nibble.engine.plugin.step_graph.runner import StepGraphRunner

    monkeypatch.setattr(model_runner, "GPUModelRunner", model_runner.GPUModelRunner)
    follow.replace_runner.__wrapped__()
    assert model_runner.GPUModelRunner is StepGraphRunner


# --- the runner's decisions -----------------------------------------------------------------------


class Graphs:
    """Records what the runner asks for, in place of CUDA graphs."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.changes = SimpleNamespace(has_room=lambda rows: True, send=self._send)
        self.fails: set[str] = set()
        self.rare, self.is_full = 1, False
        self.of = {n: SimpleNamespace(n=n, samplers={}, batch=SimpleNamespace()) for n in (1, 2)}

    def size(self, requests: int) -> Any:
        return self.of.get(requests)

    def capture_inputs(self, size: Any) -> bool:
        if "inputs" in self.fails:
            raise RuntimeError("capture")
        return not self.is_full

    def is_rare(self, size: Any, sampling: Any) -> bool:
        self.rare -= sampling not in size.samplers
        return self.rare >= 0 and sampling not in size.samplers

    def capture_sampler(self, size: Any, sampling: Any) -> bool:
        if "sampler" in self.fails:
            raise RuntimeError("capture")
        if not self.is_full:
            size.samplers[sampling] = object()
        return not self.is_full

    def send_slots(self, size: Any, slots: np.ndarray, ids: list[str]) -> None:
        self.calls.append(("slots", slots.tolist(), ids))

    def _send(self, rows: list[Any]) -> None:
        self.calls.append(("blocks", rows))

    def run_model(self, size: Any) -> None:
        self.calls.append(("model", size.n))

    def hidden_states(self, size: Any) -> tuple[str, list[str]]:
        return "hidden states", ["of another layer"]


@pytest.fixture
def runner() -> Any:
    from nibble.engine.plugin.step_graph.runner import StepGraphRunner

    made: Any = StepGraphRunner.__new__(StepGraphRunner)
    made._graphs, made._batch, made._to_sample = Graphs(), None, None
    made._has_failed, made._seen, made._tables = False, {1, 2}, tables()
    made.num_speculative_steps = 0
    made.sampler = SimpleNamespace(get_logprobs_dims=lambda slots, include_token_ids: None)
    made.observability_config = SimpleNamespace(cudagraph_metrics=False)
    made.finished = []
    made.finish_requests = lambda output: made.finished.append(output.finished_req_ids)
    made.req_states = SimpleNamespace(
        req_id_to_index={"a": 4, "b": 1, "c": 0},
        prefill_len=SimpleNamespace(np=np.array([3, 3, 3, 3, 3, 3], dtype=np.int32)),
        num_computed_tokens_np=np.zeros(6, dtype=np.int32),
    )
    return made


def step(
    ids: str = "ab", computed: int = 7, blocks: Any = None, drafts: int = 0, **more: Any
) -> Any:
    output = schedule(
        num_scheduled_tokens=dict.fromkeys(ids, 1 + drafts),
        total_num_scheduled_tokens=len(ids) * (1 + drafts),
        scheduled_spec_decode_tokens={one: [-1] * drafts for one in ids} if drafts else {},
        num_spec_tokens_to_schedule=drafts,
        **more,
    )
    output.scheduled_cached_reqs = SimpleNamespace(
        req_ids=list(ids),
        resumed_req_ids=set(),
        num_computed_tokens=[computed] * len(ids),
        new_block_ids=blocks or [None] * len(ids),
    )
    return output


def test_slots_are_sent_for_a_new_batch_and_blocks_when_there_are_some(runner: Any) -> None:
    assert runner._run_graphs(step()) == "new_sampling"
    assert runner._to_sample is None
    left = runner.execute_model_state
    assert left.hidden_states == "hidden states"
    assert left.input_batch.num_computed_prefill_tokens_np.tolist() == [3, 3]
    assert runner._run_graphs(step(computed=8)) == ""
    assert runner._to_sample is runner._batch
    assert runner._run_graphs(step(computed=9, blocks=[None, ([12],)])) == ""
    assert runner._graphs.calls == [
        ("slots", [4, 1], ["a", "b"]),
        ("model", 2),
        ("model", 2),
        ("blocks", [(1, ([12],))]),
        ("model", 2),
    ]
    assert runner.req_states.num_computed_tokens_np.tolist() == [0, 9, 0, 0, 9, 0]
    # Another request leaves: a batch of one, in its slot.
    assert runner._run_graphs(step("b", finished_req_ids={"a"})) == ""
    assert runner._graphs.calls[-2:] == [("slots", [1], ["b"]), ("model", 1)]
    assert runner.finished[-1] == {"a"}


def test_with_drafts_a_step_of_as_many_for_each_request_runs_from_graphs(runner: Any) -> None:
    runner.num_speculative_steps, asked = 3, []
    runner.sampler.get_logprobs_dims = lambda slots, include_token_ids: asked.append(
        include_token_ids
    )
    assert runner._run_graphs(step()) == "drafts"
    assert runner._run_graphs(step(drafts=2)) == "drafts"
    assert runner._run_graphs(step(drafts=3)) == "new_sampling"
    left = runner.execute_model_state
    assert left.aux_hidden_states == ["of another layer"]
    assert left.num_spec_tokens_to_schedule == 3
    # All drafts were rejected, so vLLM's scheduler goes back.
    assert runner._run_graphs(step(drafts=3, computed=8)) == ""
    assert runner.req_states.num_computed_tokens_np.tolist() == [0, 8, 0, 0, 8, 0]
    assert asked == [False]


def test_a_step_that_is_refused_changes_nothing(runner: Any) -> None:
    runner._graphs.changes.has_room = lambda rows: False
    runner.req_states.prefill_len.np[0] = 99
    refused = {
        "arrival": step(scheduled_new_reqs=[1]),
        "cache_blocks": step(blocks=[None, ([12],)]),
        "prefill": step("cb"),
        "no_graph": step("abc"),
        "grammar": step(has_structured_output_requests=True),
    }
    other_order = step()
    other_order.scheduled_cached_reqs.req_ids = ["b", "a"]
    refused["unsupported"] = other_order
    for reason, output in refused.items():
        assert runner._run_graphs(output) == reason
    assert not runner._graphs.calls and not runner.finished and runner._batch is None
    assert not runner.req_states.num_computed_tokens_np.any()


def test_the_first_step_of_a_batch_size_is_vllms(runner: Any) -> None:
    runner._seen.clear()
    assert [runner._run_graphs(step()) for _ in range(3)] == ["new_batch_size", "new_sampling", ""]


@pytest.mark.parametrize(
    ("part", "then"), [("inputs", "capture_failed"), ("sampler", "new_sampling")]
)
def test_a_failed_capture_leaves_the_step_to_vllm(
    runner: Any, part: str, then: str, caplog: pytest.LogCaptureFixture
) -> None:
    from nibble.engine.plugin.step_graph import runner as module

    module.logger.propagate = True
    runner._graphs.fails.add(part)
    with caplog.at_level(logging.WARNING, module.logger.name):
        found = [runner._run_graphs(step()) for _ in range(4)]
    assert found[-1] == found[-2] == then and runner._to_sample is None
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 1 and f"a step's {part} failed" in warned[0]


def test_without_memory_for_graphs_steps_take_the_next_best_path(runner: Any) -> None:
    assert [runner._run_graphs(step()) for _ in range(2)] == ["new_sampling", ""]
    runner._graphs.is_full = True
    runner._batch.size.samplers.clear()
    assert [runner._run_graphs(step()) for _ in range(2)] == ["new_sampling", "new_sampling"]
    assert runner._run_graphs(step("a")) == "no_graph" and not runner._has_failed


def test_new_blocks_are_zeroed_before_the_model_reads_them(runner: Any) -> None:
    zeroed: list[Any] = []
    runner.kv_block_zeroer = SimpleNamespace(zero_block_ids=zeroed.append)
    runner._graphs.run_model = lambda size: zeroed.append("model")
    runner._run_graphs(step(new_block_ids_to_zero=[12], blocks=[([12],), None]))
    assert zeroed == [[12], "model"]


def test_vllms_kv_cache_leaves_memory_for_the_graphs(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from nibble.engine.step_graph_memory import step_graph_bytes

    monkeypatch.setattr(GPUModelRunner, "profile_cudagraph_memory", lambda self: 1000)
    runner.max_num_reqs, runner.vocab_size, runner._is_asked = 8, 512, True
    assert runner.profile_cudagraph_memory() == 1000 + step_graph_bytes(8, 512)
    runner.num_speculative_steps = 3
    assert runner.profile_cudagraph_memory() == 1000 + step_graph_bytes(32, 512)
    runner._is_asked = False
    assert runner.profile_cudagraph_memory() == 1000


# --- what rules graphs out for an engine ----------------------------------------------------------


def an_engine(**changed: Any) -> Any:
    """A runner that qualifies, but for `changed`: attribute or attribute.attribute -> value."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder
    from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    sampler: Any = Sampler.__new__(Sampler)
    sampler.logits_processors, sampler.trace_replay_state = [1, 2, 3], None
    sampler.return_sampling_mask = sampler.compute_nans = sampler.use_xpu_sampler = False
    builder = TritonAttentionMetadataBuilder.__new__(TritonAttentionMetadataBuilder)
    nothing = (
        "speculator lora_config batch_sharder pcp_manager aux_output_connector ubatch_runner"
        " fast_prefill kv_block_zeroer"
    )
    made = SimpleNamespace(
        **dict.fromkeys(nothing.split()),
        parallel_config=SimpleNamespace(
            world_size_across_dp=1, tensor_parallel_size=1, enable_eplb=False
        ),
        model_config=SimpleNamespace(rswa_window=None),
        vllm_config=SimpleNamespace(ec_transfer_config=None),
        sampler=sampler,
        num_speculative_steps=0,
        adaptive_verification=None,
        rejection_sampler=None,
        use_dcp=False,
        uses_inputs_embeds=False,
        is_pooling_model=False,
        model_state=DefaultModelState.__new__(DefaultModelState),
        kv_connector=NO_OP_KV_CONNECTOR,
        cudagraph_manager=SimpleNamespace(graphs={"a": 1}),
        attn_groups=[[SimpleNamespace(get_metadata_builder=lambda lane: builder)]],
    )
    for name, value in changed.items():
        owner, _, attribute = name.rpartition("__")
        setattr(getattr(made, owner) if owner else made, attribute, value)
    return made


def hybrid_state(recoverssm: Any) -> Any:
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    state: Any = MambaHybridModelState.__new__(MambaHybridModelState)
    state.recoverssm = recoverssm
    return state


def linear_attention(has_graphs: bool) -> Any:
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    builder: Any = GDNAttentionMetadataBuilder.__new__(GDNAttentionMetadataBuilder)
    builder.use_full_cuda_graph = has_graphs
    return [[SimpleNamespace(get_metadata_builder=lambda lane: builder)]]


def test_an_engine_qualifies_or_is_refused_by_name() -> None:
    from nibble.engine.plugin.step_graph.facts import engine_facts
    from nibble.engine.plugin.step_graph.qualify import STEADY, refusal_of_engine

    def refusal(**changed: Any) -> str:
        return refusal_of_engine(engine_facts(an_engine(**changed)))

    assert refusal() == STEADY
    two = {"parallel_config__world_size_across_dp": 2}
    assert refusal(**two) == "pipeline or data parallelism"
    assert refusal(**two, parallel_config__tensor_parallel_size=2) == STEADY
    assert refusal(parallel_config__enable_eplb=True) == "balanced experts"
    assert refusal(use_dcp=True) == "context parallelism"
    assert refusal(batch_sharder=object()) == "sampling divided over GPUs"
    assert refusal(num_speculative_steps=2) == "another kind of speculative decoding"
    assert refusal(lora_config=object()) == "adapters"
    assert refusal(model_state=hybrid_state(None), kv_block_zeroer=object()) == STEADY
    assert refusal(model_state=hybrid_state(object())) == "a model with other state"
    assert refusal(attn_groups=linear_attention(has_graphs=True)) == STEADY
    assert refusal(attn_groups=linear_attention(has_graphs=False)) == "another attention backend"


def drafting(**changed: Any) -> dict[str, Any]:
    """What an engine with MTP has, but for `changed`."""
    from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    kind: Any = changed.pop("kind", MTPSpeculator)
    speculator = kind.__new__(kind)
    speculator.acceptance_estimator = speculator.draft_watermarker = None
    speculator.supports_decode_metadata_update, speculator.attn_groups = True, []
    rejection: Any = RejectionSampler.__new__(RejectionSampler)
    rejection.watermark_key = None
    config = SimpleNamespace(uses_dynamic_speculative_decoding=lambda: False)
    of_speculator = {name[3:]: changed.pop(name) for name in list(changed) if name[:3] == "of_"}
    vars(speculator).update(of_speculator)
    return {
        "speculator": speculator,
        "num_speculative_steps": 2,
        "decode_query_len": 3,
        "speculative_config": config,
        "rejection_sampler": rejection,
    } | changed


def test_an_engine_that_drafts_qualifies_if_its_drafter_is_known() -> None:
    from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator

    from nibble.engine.plugin.step_graph.facts import engine_facts
    from nibble.engine.plugin.step_graph.qualify import STEADY, refusal_of_engine

    def refusal(**changed: Any) -> str:
        return refusal_of_engine(engine_facts(an_engine(**drafting(**changed))))

    assert refusal() == STEADY
    one = {"num_speculative_steps": 1, "decode_query_len": 2}
    assert refusal(**one, of_supports_decode_metadata_update=False) == STEADY
    for changed in (
        {"of_supports_decode_metadata_update": False},
        {"of_share_mtp_topk_indices": True},
        {"of_attn_groups": linear_attention(has_graphs=False)},
        {"kind": MultiModuleMTPSpeculator},
        {"adaptive_verification": object()},
        {"rejection_sampler": None},
        {"decode_query_len": 2},
    ):
        assert refusal(**changed) == "another kind of speculative decoding", changed


# --- the scheduler's shortcut ---------------------------------------------------------------------


def managers(blocks: int, caching: bool) -> tuple[Any, Any]:
    """Two managers of cache blocks with the same content; the second takes the shortcut."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from nibble.engine.plugin.step_graph.cache_slots import skip_unchanged_blocks

    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    config = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)]
    )
    plain, shorter = (
        KVCacheManager(config, 64, 4, 4, enable_caching=caching, log_stats=False) for _ in range(2)
    )
    assert skip_unchanged_blocks(shorter)
    return plain, shorter


def content(manager: Any) -> Any:
    """All that a manager remembers."""
    kind = manager.coordinator.single_type_managers[0]
    return (
        {name: [one.block_id for one in held] for name, held in kind.req_to_blocks.items() if held},
        {name: n for name, n in kind.num_cached_block.items() if n},
        manager.block_pool.get_num_free_blocks(),
        [(one.block_id, one.ref_cnt, one.block_hash) for one in manager.block_pool.blocks],
    )


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_shortcut_leaves_the_same_blocks(seed: int, caching: bool, drafts: int) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request, RequestStatus

    init_none_hash(sha256)
    rng, hasher = random.Random(seed), get_request_block_hasher(4, sha256)
    both = managers(blocks=40, caching=caching)
    running: list[tuple[Any, Any]] = []
    skipped = 0
    for turn in range(400):
        if rng.random() < 0.1 and len(running) < 6:
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
            params = SamplingParams(max_tokens=60)
            pair = tuple(
                Request(f"r{turn}", list(prompt), params, None, block_hasher=hasher) for _ in both
            )
            if all(both[i].allocate_slots(pair[i], len(prompt)) is not None for i in (0, 1)):
                for request in pair:
                    request.status = RequestStatus.RUNNING
                    request.num_computed_tokens = len(prompt)
                running.append(pair)  # type: ignore[arg-type]
        for pair in list(running):
            # A step is scheduled before the token of the step before it is known.
            given = [
                manager.allocate_slots(request, 1 + drafts, num_lookahead_tokens=drafts)
                for manager, request in zip(both, pair, strict=True)
            ]
            ids = [one.get_block_ids() if one is not None else None for one in given]
            assert ids[0] == ids[1]
            if given[0] is None or rng.random() < 0.02 or pair[0].num_tokens > 50:
                for manager, request in zip(both, pair, strict=True):
                    manager.free(request)
                running.remove(pair)
                continue
            skipped += not any(ids[0] or ())
            tokens = [rng.randrange(3) for _ in range(rng.randint(1, 1 + drafts))]
            for manager, request in zip(both, pair, strict=True):
                request.num_computed_tokens += len(tokens)  # without rejected drafts
                request.append_output_token_ids(tokens)
                manager.cache_blocks(request, request.num_computed_tokens)
        assert content(both[0]) == content(both[1])
    assert skipped > (500 if not drafts else 100)


def test_other_caches_keep_vllms_bookkeeping() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    from nibble.engine.plugin.step_graph.cache_slots import skip_unchanged_blocks

    window = SlidingWindowSpec(
        block_size=4, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, sliding_window=8
    )
    group = KVCacheGroupSpec(["l"], window)
    config = KVCacheConfig(num_blocks=9, kv_cache_tensors=[], kv_cache_groups=[group])
    manager = KVCacheManager(config, 64, 4, 4)
    before = manager.allocate_slots
    assert not skip_unchanged_blocks(manager) and manager.allocate_slots == before
