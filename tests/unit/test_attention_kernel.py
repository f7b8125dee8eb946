"""Where the plan takes nibble's attention of decode steps, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nibble.canary.kernels import deviations, expectations
from nibble.engine.decode_attention import (
    FEW,
    WORKSPACE_BYTES,
    AttentionShape,
    is_decode_batch,
    most_queries,
    most_requests,
    refusal_of_shape,
    sequences_at_a_time,
)
from nibble.errors import ExitCode, NibbleError
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from tests.support.models.tiny_checkpoint import write_checkpoint

HEADS = {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8}


def planned(model: Path, *words: str, target: str = "hopper", **environ: str) -> Plan:
    return plan_for(read_wishes([str(model), "--target", target, *words], environ))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", config=HEADS)


def options_of(plan: Plan) -> dict[str, Any]:
    config = plan.args.get("--additional-config")
    return dict(config.value["nibble"]) if config else {}


def test_auto_takes_nibbles_for_decode_steps_on_hopper(model: Path) -> None:
    for words in ((), ("--attention-kernel", "auto"), ("--kv-cache-dtype", "bfloat16")):
        plan = planned(model, *words)
        choice = plan.choices["attention"]
        assert choice.value == "nibble" and "FlashAttention for prompts" in choice.reason
        assert options_of(plan)["attention_kernel"] == "nibble"
        assert not check_for_deviations(plan, "CUTE_PAGED")
    assert "attention_kernel" not in options_of(planned(model, target="b200"))
    vllms = planned(model, "--attention-kernel", "vllm")
    assert vllms.choices["attention"].value == "vllm"
    assert "attention_kernel" not in options_of(vllms)


@pytest.mark.parametrize(
    ("words", "environ", "why"),
    [
        ((), {"VLLM_BATCH_INVARIANT": "1"}, "VLLM_BATCH_INVARIANT"),
        (("--decode-context-parallel-size", "2"), {}, "split over ranks"),
        (("--dtype", "float16"), {}, "computes in float16"),
        (
            ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'),
            {},
            "not measured with drafts",
        ),
    ],
)
def test_auto_leaves_to_vllm_what_nibbles_cannot_serve(
    model: Path, words: tuple[str, ...], environ: dict[str, str], why: str
) -> None:
    choice = (plan := planned(model, *words, **environ)).choices["attention"]
    assert choice.value == "vllm" and "not nibble's kernel: " in choice.reason
    assert why in choice.reason and "attention_kernel" not in options_of(plan)


def test_auto_leaves_other_head_dims_windows_and_named_backends_to_vllm(
    model: Path, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", config={**HEADS, "head_dim": 64})
    choice = planned(other).choices["attention"]
    assert choice.value == "vllm" and "not measured with head dim 64" in choice.reason
    windows = {"model_type": "gemma2", "sliding_window": 64}
    sliding = write_checkpoint(tmp_path / "sliding", config=HEADS | windows)
    assert "sliding windows" in planned(sliding).choices["attention"].reason
    wide = write_checkpoint(tmp_path / "wide", config={**HEADS, "num_key_value_heads": 1})
    assert "more than 16 each" in planned(wide).choices["attention"].reason
    named = planned(model, "--attention-backend", "FLASHINFER")
    assert named.choices["attention"].value == "FLASHINFER"


def test_an_unknown_checkpoint_is_said_once() -> None:
    plan = plan_for(read_wishes(["nvidia/Qwen3-8B-NVFP4", "--target", "hopper"], {}))
    assert plan.choices["attention"].reason == "the checkpoint is unknown until pull"


def test_auto_takes_requests_of_any_length_with_each_cache_head_dim_and_group(
    tmp_path: Path,
) -> None:
    changes: tuple[dict[str, int], ...] = (
        {"max_position_embeddings": 131072},
        {"head_dim": 256},
        {"num_key_value_heads": 2},
    )
    for i, change in enumerate(changes):
        model = write_checkpoint(tmp_path / str(i), config=HEADS | change)
        assert planned(model).choices["attention"].value == "nibble"
        assert planned(model, "--kv-cache-dtype", "fp8").choices["attention"].value == "nibble"


def test_auto_leaves_several_gpus_to_vllm_and_the_user_does_not(model: Path) -> None:
    two = ("--tensor-parallel-size", "2")
    choice = planned(model, *two).choices["attention"]
    assert choice.value == "vllm" and "several GPUs" in choice.reason
    assert planned(model, *two, NIBBLE_ATTENTION="few").choices["attention"].value == "few"


def test_auto_leaves_a_cache_that_was_not_served_to_vllm(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nibble.plan.attention_kernel.AUTO_CACHES", ("bfloat16",))
    assert planned(model).choices["attention"].value == "nibble"
    choice = planned(model, "--kv-cache-dtype", "fp8").choices["attention"]
    assert choice.value == "vllm" and "not served a model with a cache in fp8" in choice.reason


def test_auto_is_vllms_where_no_target_has_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nibble.plan.attention_kernel.TARGETS", ())
    choice = (plan := planned(model)).choices["attention"]
    assert choice.value == "vllm" and "nibble" not in choice.reason
    assert "attention_kernel" not in options_of(plan)


@pytest.mark.parametrize("value", ["nibble", "few"])
@pytest.mark.parametrize("is_flag", [True, False])
def test_the_user_selects_nibbles(model: Path, value: str, is_flag: bool) -> None:
    words = ("--attention-kernel", value) if is_flag else ()
    plan = planned(model, *words, **({} if is_flag else {"NIBBLE_ATTENTION": value}))
    choice = plan.choices["attention"]
    assert choice.value == value and choice.reason.startswith("set by the user")
    assert ("NIBBLE_ATTENTION" in choice.source) != is_flag
    assert options_of(plan)["attention_kernel"] == value
    without = planned(model, "--attention-kernel", "vllm")
    added = plan.budget.workspace_bytes - without.budget.workspace_bytes
    assert added == WORKSPACE_BYTES


@pytest.mark.parametrize(
    ("target", "words", "environ", "problem"),
    [
        ("cpu", (), {}, "the CPU"),
        ("hopper", ("--attention-backend", "FLASHINFER"), {}, "names another kernel"),
        ("hopper", (), {"VLLM_BATCH_INVARIANT": "1"}, "VLLM_BATCH_INVARIANT"),
        ("hopper", ("--kv-cache-dtype", "fp8_e5m2"), {}, "fp8_e5m2"),
        ("sm120", ("--kv-cache-dtype", "fp8"), {}, "only on hopper"),
        (
            "hopper",
            ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 9}'),
            {},
            "9 tokens are drafted",
        ),
    ],
)
def test_what_it_cannot_serve_is_refused(
    model: Path, target: str, words: tuple[str, ...], environ: dict[str, str], problem: str
) -> None:
    with pytest.raises(NibbleError) as caught:
        planned(model, "--attention-kernel", "nibble", *words, target=target, **environ)
    assert caught.value.code == ExitCode.CONFIG
    assert problem in caught.value.line() and "unset NIBBLE_ATTENTION" in caught.value.line()


def test_a_model_with_another_head_dim_is_refused(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", config={**HEADS, "head_dim": 96})
    with pytest.raises(NibbleError, match="head dim is 96"):
        planned(model, "--attention-kernel", "nibble")


def test_flash_attention_may_be_named_beside_it(model: Path) -> None:
    plan = planned(model, "--attention-kernel", "nibble", "--attention-backend", "FLASH_ATTN")
    assert plan.choices["attention"].value == "nibble"


def check_for_deviations(plan: Plan, backend: str) -> list[str]:
    wanted = [one for one in expectations(plan, {}) if one.part == "attention"]
    ran: dict[str, Any] = {"device": "cuda", "operators": {"cuda": "compiled"}, "linear": {}}
    ran |= {"moe": {}, "attention": {backend: 36}}
    return [found.line() for found in deviations(wanted, [ran])]


def test_the_kernel_assertion_expects_the_backend(model: Path) -> None:
    plan = planned(model, "--attention-kernel", "nibble")
    assert not check_for_deviations(plan, "CUTE_PAGED")
    (found,) = check_for_deviations(plan, "FLASH_ATTN")
    assert "FLASH_ATTN ran, expected CUTE_PAGED" in found


def test_the_kernel_assertion_expects_vllms_backend_too_where_it_computes_most(
    model: Path,
) -> None:
    plan = planned(model, "--attention-kernel", "few", "--attention-backend", "FLASH_ATTN")
    assert not check_for_deviations(plan, "CUTE_PAGED")
    assert not check_for_deviations(plan, "FLASH_ATTN")
    (found,) = check_for_deviations(plan, "TRITON_ATTN")
    assert "expected CUTE_PAGED or flash_attn" in found


def test_which_layers_and_batches_the_kernel_takes() -> None:
    assert not refusal_of_shape(AttentionShape(128, 128, 32, 8, "auto"))
    assert not refusal_of_shape(AttentionShape(256, 256, 16, 1, "fp8"))
    for shape in (
        AttentionShape(192, 128, 32, 8, "auto"),
        AttentionShape(96, 96, 32, 8, "auto"),
        AttentionShape(128, 128, 34, 2, "auto"),
        AttentionShape(128, 128, 32, 8, "turboquant_k8v4"),
    ):
        assert refusal_of_shape(shape)
    assert [most_queries(drafts) for drafts in (0, 3, 7, 8)] == [1, 4, 8, 0]
    assert is_decode_batch(1, 1, True) and is_decode_batch(3, 4, True)
    assert not is_decode_batch(2, 1, True) and not is_decode_batch(1, 1, False)
    assert not is_decode_batch(1, 0, True) and not is_decode_batch(1, 1, object())
    assert [most_requests(value, 64) for value in ("few", "nibble")] == [FEW, 64]
    assert sequences_at_a_time(1 << 20, 256) == 160
    assert sequences_at_a_time(1 << 20, 8) == 8 and sequences_at_a_time(1 << 40, 8) == 1
