"""Where the plan takes nibble's attention of decode steps, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nibble.canary.kernels import deviations, expectations
from nibble.engine.decode_attention import (
    WORKSPACE_BYTES,
    AttentionShape,
    is_decode_batch,
    most_queries,
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


def test_auto_is_vllms_until_a_server_was_measured(model: Path) -> None:
    for words in ((), ("--attention-kernel", "auto"), ("--attention-kernel", "vllm")):
        plan = planned(model, *words)
        assert plan.choices["attention"].value == "vllm"
        assert "attention_kernel" not in options_of(plan)


@pytest.mark.parametrize(
    ("words", "environ"),
    [(("--attention-kernel", "nibble"), {}), ((), {"NIBBLE_ATTENTION": "nibble"})],
)
def test_the_user_selects_nibbles(
    model: Path, words: tuple[str, ...], environ: dict[str, str]
) -> None:
    plan = planned(model, *words, **environ)
    choice = plan.choices["attention"]
    assert choice.value == "nibble" and choice.reason.startswith("set by the user")
    assert ("NIBBLE_ATTENTION" in choice.source) == bool(environ)
    assert options_of(plan)["attention_kernel"] == "nibble"
    added = plan.budget.workspace_bytes - planned(model).budget.workspace_bytes
    assert added == WORKSPACE_BYTES


def test_auto_takes_nibbles_on_a_target_where_a_server_was_measured(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("nibble.plan.attention_kernel.TARGETS", ("hopper",))
    plan = planned(model)
    choice = plan.choices["attention"]
    assert choice.value == "nibble" and "in a server" in choice.reason
    assert options_of(plan)["attention_kernel"] == "nibble"
    assert planned(model, "--attention-kernel", "vllm").choices["attention"].value == "vllm"
    named = planned(model, "--attention-backend", "FLASHINFER")
    assert named.choices["attention"].value == "FLASHINFER"
    other = write_checkpoint(tmp_path / "other", config={**HEADS, "head_dim": 96})
    assert "attention_kernel" not in options_of(planned(other))
    assert "attention_kernel" not in options_of(planned(model, target="b200"))


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


def test_the_kernel_assertion_expects_the_backend(model: Path) -> None:
    plan = planned(model, "--attention-kernel", "nibble")
    (want,) = [one for one in expectations(plan, {}) if one.part == "attention"]
    assert want.allowed == ("CUTE_PAGED",)
    ran: dict[str, Any] = {"device": "cuda", "operators": {"cuda": "compiled"}, "linear": {}}
    ran |= {"moe": {}}
    assert not deviations([want], [{**ran, "attention": {"CUTE_PAGED": 36}}])
    (found,) = deviations([want], [{**ran, "attention": {"FLASH_ATTN": 36}}])
    assert "FLASH_ATTN ran, expected CUTE_PAGED" in found.line()


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
    assert sequences_at_a_time(1 << 20, 256) == 160
    assert sequences_at_a_time(1 << 20, 8) == 8 and sequences_at_a_time(1 << 40, 8) == 1
