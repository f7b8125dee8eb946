"""--draft-head: what the plan says, what the plugin is told, the copy's memory, and the heads that
the plugin leaves as they are.
"""

from __future__ import annotations

import gc
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import setuptools  # noqa: F401  # torch needs it; it fails to load where a test has imported pip
import torch

from nibble.plan import draft_head
from nibble.plan.draft_head import FEWER_BYTES
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from tests.support.models.tiny_checkpoint import tensors, write_checkpoint
from tests.support.models.tiny_model import MODELOPT_NVFP4

FLAG = "--additional-config"
EAGLE = ("--speculative-config", json.dumps({"method": "eagle", "model": "/draft"}))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny checkpoint, whose head counts as large."""
    monkeypatch.setattr(draft_head, "LEAST_BYTES", 1)
    return write_checkpoint(
        tmp_path / "m", tensors("nvfp4"), {"quantization_config": MODELOPT_NVFP4}
    )


def drafts(**config: Any) -> tuple[str, str]:
    return "--speculative-config", json.dumps({"num_speculative_tokens": 3, **config})


def plan(model: Path | str, target: str, *words: str, **environ: str) -> Plan:
    return plan_for(read_wishes([str(model), "--target", target, *words], environ))


def planned(model: Path | str, target: str, *words: str, **environ: str) -> tuple[str, str]:
    """The choice with its reason; what the plugin is told agrees."""
    found = plan(model, target, *words, **environ)
    config = {name: choice.value for name, choice in found.args.items()}.get(FLAG) or {}
    choice = found.choices.get("draft_head")
    told = config.get("nibble", {}).get("draft_head", "bf16")
    assert told == (choice.value if choice else "bf16")
    return told, choice.reason if choice else ""


def test_hopper_quantizes_it_and_others_where_the_user_asks(model: Path) -> None:
    for words in ((), ("--draft-head", "auto")):
        assert planned(model, "hopper", *EAGLE, *words) == ("nvfp4", FEWER_BYTES)
    assert planned(model, "hopper", *EAGLE, NIBBLE_DRAFT_HEAD="bf16") == ("bf16", "set by the user")
    for target in ("cpu", "gb10", "sm120", "b200"):
        assert planned(model, target, *EAGLE)[1].endswith("the default only on hopper")
        asked = planned(model, target, *EAGLE, "--draft-head", "nvfp4")
        assert asked == ("nvfp4", "set by the user")
    told = json.dumps({"nibble": {"draft_head": "bf16"}})
    assert planned(model, "hopper", *EAGLE, FLAG, told) == ("bf16", "set by the user")


def test_without_drafts_there_is_nothing_to_say(model: Path) -> None:
    assert planned(model, "hopper") == ("bf16", "")


@pytest.mark.parametrize(
    ("config", "is_taken"),
    [
        ({"method": "mtp"}, True),
        ({"method": "qwen3_next_mtp"}, True),
        ({"method": "eagle3", "model": "/draft"}, True),
        ({"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}, True),
        ({"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B"}, True),
        ({"model": "acme/draft"}, False),
        ({"method": "dflash", "model": "/draft"}, False),
        ({"method": "draft_model", "model": "/draft"}, False),
        ({"method": "ngram"}, False),
    ],
)
def test_only_eagle_and_mtp_heads_are_known(
    model: Path, config: dict[str, Any], is_taken: bool
) -> None:
    told, reason = planned(model, "hopper", *drafts(**config))
    assert (told == "nvfp4") == is_taken
    assert is_taken or reason.endswith("is not known to be an EAGLE or MTP head")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--linear-kernel", "vllm"), "no linear layers in nibble's kernel"),
        (("--linear-backend", "marlin"), "no linear layers in nibble's kernel"),
    ],
)
def test_what_rules_it_out_is_named(model: Path, words: tuple[str, ...], why: str) -> None:
    told, reason = planned(model, "hopper", *EAGLE, *words)
    assert told == "bf16" and why in reason


def test_a_small_head_stays(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_head, "LEAST_BYTES", 32 << 20)
    told, reason = planned(model, "hopper", *EAGLE)
    assert told == "bf16" and "MiB in BF16; the copy would save no time" in reason


def test_a_checkpoint_that_is_not_here_yet_is_not_decided_about() -> None:
    told, reason = planned("acme/x-NVFP4", "hopper", *EAGLE)
    assert (told, reason) == ("bf16", "the checkpoint is unknown until pull")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_copy_is_counted_with_the_weights(model: Path, ranks: int) -> None:
    split = ("--tensor-parallel-size", str(ranks), "--num-gpus", str(ranks))

    def weights(*words: str) -> int:
        found = plan(model, "hopper", *EAGLE, *split, *words).budget.weights_bytes
        assert found is not None
        return found

    checkpoint = plan(model, "hopper").checkpoint
    assert checkpoint is not None and checkpoint.vocab_size and checkpoint.hidden_size
    size = checkpoint.vocab_size * checkpoint.hidden_size // ranks
    assert weights() - weights("--draft-head", "bf16") == size * 9 // 16 > 0
    # Drafts then read the target's head.
    assert weights("--quantize-lm-head", "nvfp4") == weights("--draft-head", "bf16")


# --- the plugin -----------------------------------------------------------------------------------


def test_heads_that_stay_as_they_are_say_why() -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from nibble.engine.plugin.draft_head import _obstacle
    from nibble.engine.plugin.lm_head import QuantizedAtLoad

    def head(rows: int = 64, columns: int = 32, dtype: Any = torch.bfloat16) -> SimpleNamespace:
        weight = torch.zeros(rows, columns, dtype=dtype)
        return SimpleNamespace(quant_method=UnquantizedEmbeddingMethod(), weight=weight)

    plain = {None, torch.bfloat16}
    assert _obstacle(head(), plain) == ""
    assert "60 rows" in _obstacle(head(rows=60), plain)
    assert "24 columns" in _obstacle(head(columns=24), plain)
    assert "torch.float32" in _obstacle(head(dtype=torch.float32), plain)
    assert _obstacle(head(), {torch.float32}) == "its logits are in torch.float32"
    quantized = SimpleNamespace(quant_method=object.__new__(QuantizedAtLoad))
    assert _obstacle(quantized, plain) == "it is quantized already (QuantizedAtLoad)"


def test_vllms_drafters_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    from nibble.engine.plugin import draft_head as plugin

    def load(self: Any, target_model: str) -> None:
        self.model = f"drafter of {target_model}"

    heads: list[str] = []
    monkeypatch.setattr(plugin, "quantize_heads", heads.append)
    monkeypatch.setattr(plugin, "set_current_vllm_config", nullcontext)
    classes: tuple[Any, ...] = (SpecDecodeBaseProposer, DraftModelSpeculator)
    for drafter in classes:
        monkeypatch.setattr(drafter, "load_model", load)
    plugin.follow_drafters.__wrapped__()
    for drafter in classes:
        for head, method, is_gemma4 in (
            ("nvfp4", "eagle3", False),
            ("nvfp4", "mtp", True),
            ("nvfp4", "dflash", False),
            ("bf16", "mtp", False),
        ):
            gemma4 = Mock(return_value=is_gemma4)
            speculation = SimpleNamespace(method=method, use_gemma4_mtp=gemma4)
            config = SimpleNamespace(additional_config={"nibble": {"draft_head": head}})
            given = SimpleNamespace(vllm_config=config, speculative_config=speculation)
            drafter.load_model(given, f"{drafter.__name__} {head} {method}")
            assert given.model.endswith(method)
    assert heads == [f"drafter of {drafter.__name__} nvfp4 eagle3" for drafter in classes]


@torch.inference_mode()
def test_a_head_that_the_drafter_drops_does_not_stay_for_its_comparison() -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from nibble.engine.plugin.report.layer_checks import _weights
    from nibble.engine.plugin.report.probes import make_probe

    head: Any = torch.nn.Linear(32, 64, bias=False)
    head.quant_method = UnquantizedLinearMethod()
    probe = make_probe("lm_head", "kind", head, 1)
    head.cpu_linear = torch.nn.functional.linear  # which vLLM's method calls there
    cpu = torch.device("cpu")
    assert probe.module() is head and len(list(_weights(probe, cpu))) == 1
    del head
    gc.collect()
    assert probe.module() is None and list(_weights(probe, cpu)) == []
