"""Steps from graphs with drafts: the layout of their batch and the order of the drafter's graphs.
Graphs themselves need a GPU: benchmarks/step_graph_equality.py --drafts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import setuptools  # noqa: F401  # torch needs it; it fails to load where a test has imported pip
import torch

pytestmark = pytest.mark.filterwarnings("ignore")

DRAFTS, SLOTS, TOKENS = 3, 8, 64


class Manager:
    """vLLM's graphs of one model, by tokens; `padded` is what `dispatch` rounds tokens up to."""

    def __init__(self, log: list[str], name: str, padded: int, each: int) -> None:
        from vllm.config.compilation import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        self.log, self.name, self.asked = log, name, list[tuple[Any, ...]]()
        self.desc = BatchExecutionDescriptor(CUDAGraphMode.FULL, padded, padded // each, each)
        self.graphs = {self.desc: object()}
        self.use_aux_hidden_state_outputs, self.aux_hidden_states = False, list[Any]()
        self.hidden_states = torch.zeros(TOKENS, 2)

    def dispatch(self, *arguments: Any, **options: Any) -> Any:
        self.asked.append((*arguments, *options.values()))
        return self.desc

    def specialize_spec_tokens(self, desc: Any, drafts: int) -> Any:
        return desc

    def run_fullgraph(self, desc: Any) -> None:
        assert desc is self.desc
        self.log.append(self.name)


def a_runner(drafts: int = DRAFTS) -> Any:
    log: list[str] = []
    buffers = SimpleNamespace(
        query_start_loc=torch.zeros(SLOTS + 1, dtype=torch.int32),
        seq_lens=torch.zeros(SLOTS, dtype=torch.int32),
        input_ids=torch.zeros(TOKENS, dtype=torch.int32),
        positions=torch.zeros(TOKENS, dtype=torch.int64),
        is_padding=torch.zeros(TOKENS, dtype=torch.bool),
    )
    each = 1 + drafts
    speculator = SimpleNamespace(
        prefill_cudagraph_manager=Manager(log, "first", 4 * each, each),
        decode_cudagraph_manager=Manager(log, "others", 4, 1),
        draft_tokens=torch.arange(SLOTS * drafts).view(SLOTS, drafts),
        hidden_states=torch.full((TOKENS, 2), -1.0),
    )
    return SimpleNamespace(
        log=log,
        device=torch.device("cpu"),
        max_num_reqs=SLOTS,
        max_model_len=100,
        num_speculative_steps=drafts,
        input_buffers=buffers,
        speculator=speculator if drafts else None,
        cudagraph_manager=Manager(log, "model", 4 * each, each),
        req_states=SimpleNamespace(draft_tokens=torch.zeros(SLOTS, drafts, dtype=torch.int64)),
    )


def the_graphs(runner: Any) -> Any:
    """StepGraphs without what needs a GPU."""
    from nibble.engine.plugin.step_graph.drafts import Drafter
    from nibble.engine.plugin.step_graph.graphs import StepGraphs

    made: Any = StepGraphs.__new__(StepGraphs)
    made._runner, made._device, made._drafts = runner, runner.device, runner.num_speculative_steps
    made.drafter = Drafter(runner) if runner.num_speculative_steps else None
    made._slots, made.sizes = torch.zeros(SLOTS, dtype=torch.int64), {}
    return made


def test_a_batch_has_a_token_and_its_drafts_for_each_request() -> None:
    runner = a_runner()
    size = the_graphs(runner).size(3)
    batch = size.batch
    assert runner.cudagraph_manager.asked == [(3, 12, 4, 0, 4)]
    assert (batch.num_reqs, batch.num_reqs_after_padding) == (3, 4)
    assert (batch.num_tokens, batch.num_tokens_after_padding) == (12, 16)
    assert batch.num_scheduled_tokens.tolist() == [4, 4, 4]
    assert batch.num_draft_tokens == 9 and batch.num_draft_tokens_per_req.tolist() == [3, 3, 3]
    # vLLM pads with the end of the last request (vllm 0.32 v1/worker/gpu/model_runner.py:1440).
    assert batch.query_start_loc_np.tolist() == [0, 4, 8, 12, 12]
    assert size.starts.tolist() == [0, 4, 8] + [12] * (SLOTS - 2)
    assert batch.cu_num_logits_np.tolist() == batch.cu_num_logits.tolist() == [0, 4, 8, 12]
    assert {batch.cu_num_logits.dtype, size.starts.dtype} == {torch.int32}
    assert batch.cu_num_logits_np.dtype == batch.query_start_loc_np.dtype == np.int32
    assert batch.input_ids.shape == batch.positions.shape == batch.is_padding.shape == (16,)
    assert size.is_request.tolist() == [True, True, True, False]


def test_without_drafts_a_batch_has_one_token_for_each_request() -> None:
    size = the_graphs(a_runner(drafts=0)).size(3)
    assert size.drafting is None
    assert size.batch.num_draft_tokens == 0 and size.batch.num_draft_tokens_per_req is None
    assert size.batch.cu_num_logits.tolist() == [0, 1, 2, 3]
    assert size.batch.expanded_idx_mapping is size.batch.idx_mapping


@pytest.mark.parametrize("missing", ["first", "others"])
def test_without_a_graph_of_the_drafter_there_is_no_batch(missing: str) -> None:
    runner = a_runner()
    speculator = runner.speculator
    managers = (speculator.prefill_cudagraph_manager, speculator.decode_cudagraph_manager)
    next(one for one in managers if one.name == missing).graphs.clear()
    assert the_graphs(runner).size(3) is None


def test_the_drafters_graphs_run_in_vllms_order() -> None:
    runner = a_runner()
    graphs = the_graphs(runner)
    size = graphs.size(3)
    speculator = runner.speculator
    # The first token is drafted for the model's padded batch, others for one token a request.
    assert speculator.prefill_cudagraph_manager.asked == [(3, 16, 4, 0)]
    assert speculator.decode_cudagraph_manager.asked == [(3, 3, 1, 0)]
    for name in ("between", "after"):
        setattr(size.drafting, name, recorded(runner.log, name))
    graphs.draft(size)
    assert runner.log == ["first", "between", "others", "after"]


def test_one_drafted_token_needs_one_graph_of_the_drafter() -> None:
    runner = a_runner(drafts=1)
    graphs = the_graphs(runner)
    size = graphs.size(3)
    size.drafting.after = recorded(runner.log, "after")
    graphs.draft(size)
    assert runner.log == ["first", "after"]
    assert not runner.speculator.decode_cudagraph_manager.asked


def recorded(log: list[str], name: str) -> Any:
    return SimpleNamespace(replay=lambda: log.append(name))


def test_drafts_are_kept_in_the_slots_of_their_requests() -> None:
    runner = a_runner()
    graphs = the_graphs(runner)
    batch = graphs.size(3).batch
    batch.idx_mapping.copy_(torch.tensor([5, 0, 2]))
    graphs.drafter.keep(batch)
    kept = runner.req_states.draft_tokens
    assert kept[[5, 0, 2]].tolist() == graphs.drafter.tokens(3).tolist()
    assert not kept[[1, 3, 4, 6, 7]].any()


@pytest.mark.parametrize("reads_others", [False, True])
def test_the_drafter_reads_hidden_states_and_rejections(
    reads_others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nibble.engine.plugin.step_graph import drafts

    runner = a_runner()
    graphs = the_graphs(runner)
    batch = graphs.size(3).batch
    asked: list[Any] = []
    monkeypatch.setattr(drafts, "prepare_prefill_inputs", lambda *given: asked.append(given))
    tables = [SimpleNamespace(gpu=torch.ones(SLOTS)) for _ in range(2)]
    states = SimpleNamespace(temperature=tables[0], seeds=tables[1])
    runner.model, runner.sampler = object(), SimpleNamespace(sampling_states=states)
    runner.req_states.last_sampled_tokens = runner.req_states.next_prefill_tokens = "tokens"
    speculator = runner.speculator
    speculator._copy_request_inputs = lambda *given: asked.append(given)
    speculator.last_token_indices = speculator.current_draft_step = "drafter's"
    speculator.input_buffers, speculator.max_num_reqs = "buffers", SLOTS
    speculator.model = SimpleNamespace(combine_hidden_states=lambda found: found.sum(1, True))
    output = SimpleNamespace(num_sampled="sampled", num_rejected=torch.tensor([1, 0, 3]))
    hidden = torch.arange(32.0).view(16, 2)
    others = [hidden, 2 * hidden] if reads_others else []
    graphs.drafter.prepare_first(batch, hidden, others, output)
    assert asked[0] == (3, batch.idx_mapping, tables[0].gpu, tables[1].gpu)
    assert asked[1][3] is batch and asked[1][4:6] == ("sampled", output.num_rejected)
    assert graphs.drafter._rejected.tolist() == [1, 0, 3, 0, 0, 0, 0, 0]
    wanted = torch.cat(others, 1).sum(1, True).expand(16, 2) if reads_others else hidden
    assert torch.equal(speculator.hidden_states[:16], wanted)
    assert (speculator.hidden_states[16:] == -1).all()


def test_linear_attention_finds_on_the_device_which_rows_have_drafts() -> None:
    from vllm.v1.attention.backends import gdn_attn

    from nibble.engine.plugin.step_graph.graphs import _requests_on_device

    backend: Any = gdn_attn
    size, before = the_graphs(a_runner()).size(3), backend.async_tensor_h2d
    with _requests_on_device(size):
        drafted = torch.tensor([3, 3, 3, -1], dtype=torch.int32) >= 0
        assert backend.async_tensor_h2d(drafted, device="cuda") is size.is_request
        with pytest.raises(ValueError, match="something else"):
            backend.async_tensor_h2d(~drafted, device="cuda")
    assert backend.async_tensor_h2d is before


def test_tokens_after_the_first_rejected_draft_are_left_out() -> None:
    from nibble.engine.plugin.step_graph.output import accepted

    assert accepted([[7], [8]]) == [[7], [8]]
    assert accepted([[7, 8, 0, 0, 2], [9, 1, 2, 3, 4], [5, 0, 0, 0, 1]]) == [
        [7, 8],
        [9, 1, 2, 3],
        [5],
    ]


def test_the_builder_of_linear_attention_copies_nothing_else_from_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends import gdn_attn

    from nibble.engine.plugin.step_graph.graphs import _requests_on_device

    size = the_graphs(a_runner()).size(3)
    batch, each = size.batch, 1 + DRAFTS
    starts = torch.tensor(batch.query_start_loc_np)
    common = CommonAttentionMetadata(
        query_start_loc=size.starts[:5],
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([9, 8, 7, 0], dtype=torch.int32),
        num_reqs=4,
        num_actual_tokens=batch.num_tokens_after_padding,
        max_query_len=each,
        max_seq_len=100,
        block_table_tensor=torch.arange(4 * each, dtype=torch.int32).view(4, each),
        slot_mapping=torch.zeros(16, dtype=torch.int64),
    )
    more = {
        "num_accepted_tokens": torch.tensor([2, 1, 4, 1], dtype=torch.int32),
        "num_decode_draft_tokens_cpu": torch.tensor([3, 3, 3, -1], dtype=torch.int32),
    }

    def built() -> dict[str, torch.Tensor]:
        kind: Any = gdn_attn.GDNAttentionMetadataBuilder
        builder = kind.__new__(kind)
        builder.use_spec_decode = builder.use_full_cuda_graph = True
        builder.num_spec, builder.decode_cudagraph_max_bs = DRAFTS, 16
        builder.mamba_aligned_state_indices = common.block_table_tensor
        buffers = {
            "spec_state_indices_tensor": (16, each),
            "spec_token_indx": (64,),
            "non_spec_token_indx": (64,),
            "spec_query_start_loc": (17,),
            "num_accepted_tokens": (16,),
        }
        for name, shape in buffers.items():
            setattr(builder, name, torch.full(shape, -7, dtype=torch.int32))
        builder.spec_sequence_masks = torch.zeros(16, dtype=torch.bool)
        metadata = builder.build(0, common, **more)
        assert metadata.num_spec_decodes == 3 and not metadata.num_prefills + metadata.num_decodes
        return {name: getattr(builder, name) for name in (*buffers, "spec_sequence_masks")}

    plain = built()
    with _requests_on_device(size):
        found = built()
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    assert found["spec_query_start_loc"][:5].tolist() == [0, 4, 8, 12, 12]
