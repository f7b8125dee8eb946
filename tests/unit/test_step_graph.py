"""Which steps run from CUDA graphs, how they are counted, and the option."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from nibble.engine.contract import PULSE_FOLDER
from nibble.engine.contract.pulse import STEP_REASONS, StepCounts, StepPath, steps_file
from nibble.engine.plugin.step_graph.counts import Counter, pulse_folder, read_counts, report_metric
from nibble.engine.plugin.step_graph.qualify import (
    STEADY,
    SamplerTables,
    Sampling,
    is_prefilling,
    refusal_of_engine,
    refusal_of_schedule,
    sampling_of,
)
from nibble.engine.step_graph_memory import (
    LEAST_RELEASED,
    MOST_REQUESTS,
    MOST_SAMPLERS,
    action_before_capture,
    long_prompt_bytes,
    prompt_graph_bytes,
    step_graph_bytes,
)
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.step_graph import RIGHT
from tests.support.models.tiny_checkpoint import tensors, write_checkpoint
from tests.support.models.tiny_model import MODELOPT_NVFP4

FLAG = "--additional-config"
LINEAR_ATTENTION = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "full_attention_interval": 2,
}
MAMBA = {
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}


def schedule(**changed: Any) -> SimpleNamespace:
    """A SchedulerOutput of two requests, one token each."""
    cached = SimpleNamespace(resumed_req_ids=changed.pop("resumed", set()))
    plain: dict[str, Any] = {
        "scheduled_new_reqs": [],
        "scheduled_cached_reqs": cached,
        "num_scheduled_tokens": {"a": 1, "b": 1},
        "total_num_scheduled_tokens": 2,
        "scheduled_spec_decode_tokens": {},
        "scheduled_encoder_inputs": {},
        "finished_req_ids": set(),
        "free_encoder_mm_hashes": [],
        "preempted_req_ids": None,
        "has_structured_output_requests": False,
        "new_block_ids_to_zero": None,
        "kv_cache_block_copies": None,
        "num_spec_tokens_to_schedule": 0,
    }
    return SimpleNamespace(**plain | changed)


def test_one_token_for_each_request_is_steady_also_when_others_end() -> None:
    assert refusal_of_schedule(schedule()) == STEADY
    assert refusal_of_schedule(schedule(finished_req_ids={"c"})) == STEADY


@pytest.mark.parametrize(
    ("reason", "changed"),
    [
        ("empty", {"num_scheduled_tokens": {}, "total_num_scheduled_tokens": 0}),
        ("arrival", {"scheduled_new_reqs": [object()]}),
        ("preemption", {"preempted_req_ids": {"c"}}),
        ("preemption", {"resumed": {"a"}}),
        ("drafts", {"scheduled_spec_decode_tokens": {"a": [1]}, "total_num_scheduled_tokens": 3}),
        ("drafts", {"num_spec_tokens_to_schedule": 3}),
        ("encoder", {"scheduled_encoder_inputs": {"a": [0]}}),
        ("encoder", {"free_encoder_mm_hashes": ["x"]}),
        ("cache_blocks", {"kv_cache_block_copies": [object()]}),
        ("grammar", {"has_structured_output_requests": True}),
        ("prefill", {"num_scheduled_tokens": {"a": 1, "b": 9}, "total_num_scheduled_tokens": 10}),
    ],
)
def test_anything_else_is_refused_with_its_reason(reason: str, changed: dict[str, Any]) -> None:
    assert refusal_of_schedule(schedule(**changed)) == reason
    assert STEP_REASONS[reason] == "vllm"


DRAFTS = {
    "num_scheduled_tokens": {"a": 4, "b": 4},
    "total_num_scheduled_tokens": 8,
    "scheduled_spec_decode_tokens": {"a": [-1] * 3, "b": [-1] * 3},
    "num_spec_tokens_to_schedule": 3,
}


@pytest.mark.parametrize(
    ("reason", "changed"),
    [
        (STEADY, {}),
        (STEADY, {"finished_req_ids": {"c"}}),
        # Fewer drafts, or none: of one request, of all, or in the next step.
        ("drafts", {"scheduled_spec_decode_tokens": {"a": [-1] * 3, "b": [-1] * 2}}),
        ("drafts", {"scheduled_spec_decode_tokens": {"a": [-1] * 3}}),
        ("drafts", {"scheduled_spec_decode_tokens": {}, "total_num_scheduled_tokens": 2}),
        ("drafts", {"num_spec_tokens_to_schedule": 2}),
        # The prompt of b is as long as a token and its drafts.
        ("drafts", {"scheduled_spec_decode_tokens": {"a": [-1] * 3, "b": []}}),
        (
            "prefill",
            {
                "num_scheduled_tokens": {"a": 4, "b": 9},
                "scheduled_spec_decode_tokens": {"a": [-1] * 3},
                "total_num_scheduled_tokens": 13,
            },
        ),
        ("grammar", {"has_structured_output_requests": True}),
    ],
)
def test_with_drafts_each_request_has_as_many(reason: str, changed: dict[str, Any]) -> None:
    assert refusal_of_schedule(schedule(**DRAFTS | changed), 3) == reason
    assert refusal_of_schedule(schedule(**DRAFTS), 2) == "drafts"
    assert refusal_of_schedule(schedule(**DRAFTS)) == "drafts"


def test_the_last_token_of_a_prompt_is_no_decode_step() -> None:
    prompt = np.array([8, 5], dtype=np.int32)
    assert is_prefilling(np.array([7, 9], dtype=np.int32), prompt)
    assert not is_prefilling(np.array([8, 5], dtype=np.int32), prompt)


def test_the_first_fact_that_rules_graphs_out_is_named() -> None:
    assert refusal_of_engine({"adapters": False, "two": True, "three": True}) == "two"
    assert refusal_of_engine({"adapters": False}) == STEADY


# --- the sampler ----------------------------------------------------------------------------------

VOCABULARY = 100


def tables(slots: int = 6, **changed: Any) -> SamplerTables:
    """Greedy requests in all slots."""
    values: dict[str, Any] = {
        "needs_processing": np.zeros(slots, dtype=bool),
        "use_bias": np.zeros(slots, dtype=bool),
        "restores": np.zeros(slots, dtype=np.int32),
        "use_penalty": np.zeros(slots, dtype=bool),
        "bad_words": np.zeros(slots, dtype=np.int32),
        "temperature": np.zeros(slots, dtype=np.float32),
        "min_p": np.zeros(slots, dtype=np.float32),
        "top_k": np.full(slots, VOCABULARY, dtype=np.int32),
        "top_p": np.ones(slots, dtype=np.float32),
        "seeds_set": np.zeros(slots, dtype=bool),
    }
    values |= {"vocabulary": VOCABULARY, "thinking": None, "has_fused_sampler": True}
    values |= {"processed_logprobs": False} | changed
    return SamplerTables(**values)


def with_slot(made: SamplerTables, slot: int, **values: Any) -> SamplerTables:
    for name, value in values.items():
        getattr(made, name)[slot] = value
    return made


ROWS = np.array([4, 1])


def test_greedy_requests_need_nothing() -> None:
    assert sampling_of(tables(), ROWS, None) == (Sampling(), STEADY)


def test_requests_of_other_slots_do_not_count() -> None:
    made = with_slot(tables(), 2, needs_processing=True, temperature=0.5, use_penalty=True)
    assert sampling_of(made, ROWS, None) == (Sampling(), STEADY)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"temperature": 0.5}, {"has_temperature": True}),
        ({"temperature": 1.0, "min_p": 0.1}, {"has_min_p": True}),
        ({"use_penalty": True}, {"has_penalties": True}),
        ({"use_bias": True}, {"has_bias": True}),
        ({"use_bias": True, "restores": 1}, {"has_bias": True, "restores_stop_tokens": True}),
        ({"bad_words": 3}, {"bad_words": 3}),
    ],
)
def test_each_processing_of_logits_has_its_graph(
    values: dict[str, Any], expected: dict[str, Any]
) -> None:
    made = with_slot(tables(), 1, needs_processing=True, **values)
    assert sampling_of(made, ROWS, None) == (Sampling(is_processed=True, **expected), STEADY)


def test_log_probs_have_graphs_by_their_number() -> None:
    found = {sampling_of(tables(), ROWS, logprobs)[0] for logprobs in (None, (0, 0), (5, 0))}
    assert len(found) == 3


def test_flashinfers_sampler_is_not_captured() -> None:
    """It reads the random generator's state on the host."""

    def hot(**values: Any) -> SamplerTables:
        made = tables()
        for slot in ROWS:
            with_slot(made, slot, needs_processing=True, temperature=0.9, **values)
        return made

    for values in ({"top_k": 5}, {"top_p": 0.9}):
        assert sampling_of(hot(**values), ROWS, None)[1] == "random_sampler"
        # A seed, or a greedy request beside it, makes vLLM use its own kernels.
        assert sampling_of(hot(**values, seeds_set=True), ROWS, None)[1] == STEADY
        assert sampling_of(with_slot(hot(**values), 1, temperature=0), ROWS, None)[1] == STEADY
    assert sampling_of(hot(), ROWS, None)[1] == STEADY
    without = replace(hot(top_k=5), has_fused_sampler=False)
    assert sampling_of(without, ROWS, None)[1] == STEADY
    processed = replace(hot(top_k=5), processed_logprobs=True)
    assert sampling_of(processed, ROWS, (1, 0))[1] == STEADY


def test_a_thinking_budget_takes_vllms_path() -> None:
    made = tables(thinking=np.array([False, True, False, False, False, False]))
    with_slot(made, 1, needs_processing=True)
    reason = sampling_of(made, ROWS, None)[1]
    assert reason == "thinking_budget" and STEP_REASONS[reason] == "vllm"
    assert sampling_of(made, np.array([0, 2]), None)[1] == STEADY


# --- counts ---------------------------------------------------------------------------------------


def test_every_reason_has_a_path() -> None:
    assert set(STEP_REASONS.values()) == set(get_args(StepPath))


def test_counts_of_all_engines_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(tmp_path)
    for reason in ("steady", "steady", "arrival"):
        counter.add(reason)
    assert counter.to_json() == {"steady": 2, "arrival": 1}
    assert (tmp_path / steps_file(os.getpid())).stat().st_size == StepCounts.size
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    Counter(tmp_path).add("steady")
    (tmp_path / steps_file("*").replace("*", "1")).write_bytes(b"of another version")
    found = read_counts(tmp_path)
    assert {name: n for name, n in found.items() if n} == {"steady": 3, "arrival": 1}


def test_without_a_folder_nothing_is_written() -> None:
    counter = Counter(None)
    counter.add("steady")
    assert counter.to_json() == {"steady": 1}


def test_metrics_have_the_counts_by_path_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    monkeypatch.delenv(PULSE_FOLDER, raising=False)
    assert pulse_folder() is None
    report_metric()
    assert not prometheus_client.generate_latest(registry)
    monkeypatch.setenv(PULSE_FOLDER, str(tmp_path))
    report_metric()
    counter = Counter(tmp_path)
    counter.add("steady")
    counter.add("drafts")
    page = prometheus_client.generate_latest(registry).decode()
    assert 'nibble_engine_steps_total{path="graph",reason="steady"} 1.0' in page
    assert 'nibble_engine_steps_total{path="vllm",reason="drafts"} 1.0' in page


# --- the option -----------------------------------------------------------------------------------


def planned(model: Path, target: str, *words: str, **environ: str) -> tuple[str, str]:
    """The choice with its reason; what the plugin is told agrees."""
    wishes = read_wishes([str(model), "--target", target, *words], environ)
    found = plan_for(wishes)
    config = {name: choice.value for name, choice in found.args.items()}.get(FLAG) or {}
    choice = found.choices.get("step_graph")
    told = config.get("nibble", {}).get("step_graph", "off")
    assert told == (choice.value if choice else "off")
    return told, choice.reason if choice else ""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(
        tmp_path / "m", tensors("nvfp4"), {"quantization_config": MODELOPT_NVFP4}
    )


def test_hopper_has_steps_from_graphs_and_the_plan_says_why(model: Path) -> None:
    for words in ((), ("--step-graph", "auto")):
        assert planned(model, "hopper", *words) == ("on", RIGHT)
    assert planned(model, "hopper", NIBBLE_STEP_GRAPH="off") == ("off", "set by the user")
    assert planned(model, "cpu") == ("off", "")
    for target in ("gb10", "sm120", "b200"):
        assert planned(model, target)[1] == "steps from graphs are tested only on hopper"
        assert planned(model, target, "--step-graph", "on") == ("on", "set by the user")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--enforce-eager",), "vLLM's path runs all steps without CUDA graphs"),
        (("--enable-lora",), "vLLM's path runs all steps with adapters"),
        (("--spec-method", "ngram"), "not tested with drafts of ngram"),
        (("--tensor-parallel-size", "2"), "not tested with tensor parallelism"),
        (("--pipeline-parallel-size", "2"), "not tested with pipeline parallelism"),
        (("--data-parallel-size", "2"), "not tested with data parallelism"),
    ],
)
def test_flags_that_rule_graphs_out_are_named(
    model: Path, words: tuple[str, ...], what: str
) -> None:
    told, why = planned(model, "hopper", "--num-gpus", "2", *words)
    assert told == "off" and why.endswith(what)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"model_type": "jamba"} | MAMBA, "recurrent state"),
        ({"model_type": "gemma2", "sliding_window": 64}, "sliding windows"),
        ({"model_type": "other", "architectures": ["OtherForCausalLM"]}, "OtherForCausalLM"),
    ],
)
def test_models_that_have_not_run_take_vllms_path_unless_the_user_asks(
    tmp_path: Path, config: dict[str, Any], what: str
) -> None:
    untested = write_checkpoint(
        tmp_path / "u", tensors("nvfp4"), {"quantization_config": MODELOPT_NVFP4} | config
    )
    assert planned(untested, "hopper") == ("off", f"steps from graphs are not tested with {what}")
    assert planned(untested, "hopper", "--step-graph", "on") == ("on", "set by the user")


@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_drafts_of_an_eagle_and_an_mtp_head_have_steps_from_graphs(
    model: Path, method: str
) -> None:
    assert planned(model, "hopper", "--spec-method", method) == ("on", RIGHT)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text"])
def test_gated_delta_nets_have_steps_from_graphs(tmp_path: Path, model_type: str) -> None:
    config = {"quantization_config": MODELOPT_NVFP4, "model_type": model_type}
    hybrid = write_checkpoint(tmp_path / "h", tensors("nvfp4"), config | LINEAR_ATTENTION)
    assert planned(hybrid, "hopper") == ("on", RIGHT)


def test_a_checkpoint_that_is_not_here_yet_is_not_decided_about() -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": "/nonexistent"}
    found = plan_for(read_wishes(["acme/x-NVFP4", "--target", "hopper"], offline))
    assert found.choices["step_graph"].reason == "the checkpoint is unknown until pull"


# --- memory ---------------------------------------------------------------------------------------


def test_the_plan_reserves_what_the_graphs_may_take(model: Path) -> None:
    def graphs(*words: str) -> int:
        wishes = read_wishes([str(model), "--target", "hopper", *words], {})
        return plan_for(wishes).budget.graphs_bytes

    without = graphs("--step-graph", "off")
    config = json.loads((model / "config.json").read_text())
    vocabulary = config["vocab_size"]
    prompts = prompt_graph_bytes(config["num_attention_heads"], config["head_dim"])
    assert graphs("--max-num-seqs", "8") - without == step_graph_bytes(8, vocabulary) + prompts
    assert graphs() - without == step_graph_bytes(None, vocabulary) + prompts
    drafts = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}')
    with_drafts = graphs("--max-num-seqs", "8", *drafts, "--step-graph", "on")
    without = graphs("--max-num-seqs", "8", *drafts, "--step-graph", "off")
    assert with_drafts - without == step_graph_bytes(8, vocabulary, 3)
    assert graphs("--enforce-eager") == 0


def test_the_plan_reserves_the_activations_of_long_prompts(tmp_path: Path) -> None:
    """With nibble's attention, which computes head dims of 64, 128 and 256."""
    heads = {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8}
    model = write_checkpoint(tmp_path / "m", config=heads)

    def graphs(kernel: str, *words: str) -> int:
        words = (str(model), "--target", "hopper", "--attention-kernel", kernel, *words)
        return plan_for(read_wishes(list(words), {})).budget.graphs_bytes

    hidden = json.loads((model / "config.json").read_text())["hidden_size"]
    whole = graphs("nibble") - graphs("vllm")
    assert whole == long_prompt_bytes(hidden, 8192) == 2048 * 32 * 2 * hidden
    few = ("--max-num-batched-tokens", "1024", "--max-model-len", "512")
    assert graphs("nibble", *few) - graphs("vllm", *few) == whole / 2


def test_linear_attention_has_no_graphs_for_prompts(tmp_path: Path) -> None:
    config = {"quantization_config": MODELOPT_NVFP4, "model_type": "qwen3_next"}
    hybrid = write_checkpoint(tmp_path / "h", tensors("nvfp4"), config | LINEAR_ATTENTION)
    wishes = read_wishes([str(hybrid), "--target", "hopper", "--max-num-seqs", "8"], {})
    assert plan_for(wishes).args["--cudagraph-capture-sizes"].value == [1, 2, 4, 8]


def test_an_fp8_cache_has_no_graphs_for_prompts(model: Path) -> None:
    words = ["--target", "hopper", "--max-num-seqs", "8", "--kv-cache-dtype", "fp8"]
    found = plan_for(read_wishes([str(model), *words], {}))
    assert found.args["--cudagraph-capture-sizes"].value == [1, 2, 4, 8]


def test_two_gpus_share_the_heads_of_the_graphs_for_prompts() -> None:
    assert prompt_graph_bytes(32, 128) == 32 * 512 * 32 * 128 * 4 == 2 * prompt_graph_bytes(16, 128)


def test_graph_memory_grows_with_requests_and_vocabulary_up_to_a_limit() -> None:
    assert step_graph_bytes(8, 1000) < step_graph_bytes(9, 1000) < step_graph_bytes(9, 2000)
    assert step_graph_bytes(1024, 1000) == step_graph_bytes(MOST_REQUESTS, 1000)
    assert step_graph_bytes(8, 1000, drafts=3) == step_graph_bytes(32, 1000)
    assert step_graph_bytes(None, None) < 1 << 30


def test_captures_end_or_replace_others_at_the_limit() -> None:
    assert action_before_capture(20, 99, 100) == "capture"
    assert action_before_capture(20, 100, 100) == "release"
    assert action_before_capture(LEAST_RELEASED - 1, 100, 100) == "stop"
    assert action_before_capture(MOST_SAMPLERS, 0, 100) == "release"
