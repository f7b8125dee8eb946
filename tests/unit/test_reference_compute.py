"""Streamed modules against the same module loaded whole by transformers: every architecture,
every layout of weights.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nibble.checkpoint import read_checkpoint
from nibble.machine.paths import demo_models
from nibble.reference.streaming import InBf16, RoundedInputs, StreamedModel
from nibble.reference.weights import (
    BY_TOKEN,
    INPUT,
    Unsupported,
    Weights,
    block_size,
    rounded_input,
)
from tests.support.models.generated_nvfp4 import Shape, write_checkpoint

CPU = torch.device("cpu")
TEXTS = ((1, 5, 9, 40, 41, 42, 43, 44, 45, 46, 47, 48), (1, 7, 3), (2, 100, 90, 80, 70, 60))
SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_local_experts": 8,
}
ARCHITECTURES = {
    "LlamaForCausalLM": {},
    "Qwen3ForCausalLM": {"tie_word_embeddings": True},
    "Gemma2ForCausalLM": {"sliding_window": 4, "query_pre_attn_scalar": 16},
    "Gemma3ForCausalLM": {"sliding_window": 4, "query_pre_attn_scalar": 16},
    "Phi3ForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "GraniteForCausalLM": {"embedding_multiplier": 2.0, "logits_scaling": 3.0},
    "MixtralForCausalLM": EXPERTS,
    "Qwen3MoeForCausalLM": EXPERTS,
    "Qwen3NextForCausalLM": {
        **EXPERTS,
        "shared_expert_intermediate_size": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"] * 1 + ["linear_attention"],
    },
    "GptOssForCausalLM": {**EXPERTS, "sliding_window": 4},
    # A buffer of each layer that the model around the layers fills.
    "FalconH1ForCausalLM": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_ssm": 64,
        "ssm_multipliers": [0.5, 0.25, 2.0, 0.5, 0.75],
    },
}


def streamed(
    folder: Path, activations: str = "bf16", keeps: bool = False, dtype: torch.dtype = torch.float32
) -> list[Any]:
    checkpoint = read_checkpoint(str(folder))
    with Weights(checkpoint, dtype, CPU, activations == "fp4") as weights:
        model = StreamedModel(checkpoint, weights, dtype, CPU, keeps)
        return model.passes(
            [lambda ids=ids: model.module(torch.tensor([ids])).logits[0] for ids in TEXTS]
        )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_streamed_module_computes_what_the_loaded_one_does(name: str, tmp_path: Path) -> None:
    import transformers

    found: Any = getattr(transformers, name)
    torch.manual_seed(0)
    config = found.config_class(**{**SMALL, **ARCHITECTURES[name]})
    found(config).to(torch.bfloat16).save_pretrained(tmp_path)
    model = found.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    for ids, logits in zip(TEXTS, streamed(tmp_path), strict=True):
        with torch.inference_mode():
            right = model(torch.tensor([ids])).logits[0]
        assert torch.allclose(logits, right, atol=1e-4, rtol=1e-4), float(
            (logits - right).abs().max()
        )


@pytest.fixture(scope="module", params=["nibble-demo-nvfp4", "nibble-demo-moe-nvfp4"])
def demo(request: pytest.FixtureRequest) -> Iterator[tuple[Path, Any]]:
    from emulate_nvfp4 import nvfp4_model

    folder = demo_models()[request.param]
    with nvfp4_model(folder) as model:
        yield folder, model.eval()


def test_nvfp4_weights_and_activations_are_those_of_the_emulation(demo: tuple[Path, Any]) -> None:
    folder, model = demo
    found = streamed(folder, "fp4")
    kept = streamed(folder, "fp4", keeps=True)
    for ids, logits, again in zip(TEXTS, found, kept, strict=True):
        with torch.inference_mode():
            right = model(torch.tensor([ids])).logits[0]
        assert float((logits - right).abs().max()) < 2e-3
        assert torch.equal(logits, again)


def test_both_layouts_of_the_same_numbers_give_the_same_logits(tmp_path: Path) -> None:
    shape = Shape(
        hidden=64,
        intermediate=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocabulary=128,
        experts=4,
    )
    folders = [
        write_checkpoint(tmp_path / kind, shape, kind, w4a4=True)
        for kind in ("modelopt", "compressed-tensors")
    ]
    one, other = (streamed(folder, "fp4") for folder in folders)
    for a, b in zip(one, other, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_float64_agrees_and_rounds_less(tmp_path: Path) -> None:
    folder = demo_models()["nibble-demo"]
    for a, b in zip(streamed(folder), streamed(folder, dtype=torch.float64), strict=True):
        assert b.dtype == torch.float64
        assert float((a - b).abs().max()) < 1e-2


@pytest.mark.parametrize(("keeps", "times"), [(False, 2), (True, 1)])
def test_the_output_head_is_read_once_for_all_texts(
    keeps: bool, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts; for the next token again, unless weights are kept."""
    head, read, load = "model.embed_tokens.weight", list[tuple[int, int]](), Weights.load

    def told(self: Weights, name: str, *rows: int) -> torch.Tensor:
        if (
            name == head and rows[1] - rows[0] > 1
        ):  # and no row of the embedding, which this model shares
            read.append((rows[0], rows[1]))
        return load(self, name, *rows)

    monkeypatch.setattr(Weights, "load", told)
    monkeypatch.setattr("nibble.reference.streaming.HEAD_ROWS", 400)
    checkpoint = read_checkpoint(str(demo_models()["nibble-demo-nvfp4"]))
    with Weights(checkpoint, torch.float32, CPU, False) as weights:
        model = StreamedModel(checkpoint, weights, torch.float32, CPU, keeps)

        def two_tokens(ids: tuple[int, ...]) -> torch.Tensor:
            model.module(torch.tensor([ids]), use_cache=False)
            return model.module(torch.tensor([ids[:2]]), use_cache=False).logits

        found = model.passes([lambda ids=ids: two_tokens(ids) for ids in TEXTS])
        rows = weights.shape(head)[0]
    parts = [(start, min(rows, start + 400)) for start in range(0, rows, 400)]
    assert len(parts) > 1 and read == parts * times
    assert all(logits.shape[-1] == rows for logits in found)


def test_only_chosen_experts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    load = Weights.load
    monkeypatch.setattr(
        Weights, "load", lambda self, name, *rows: (read.append(name), load(self, name, *rows))[1]
    )
    monkeypatch.setattr(sys.modules[__name__], "TEXTS", ((1,),))
    streamed(demo_models()["nibble-demo-moe-nvfp4"])
    experts = {
        name.split(".experts.")[1].split(".")[0]
        for name in read
        if ".layers.0." in name and ".experts." in name
    }
    assert len(experts) == 2, "one token chooses two of eight"


def test_a_checkpoint_that_computes_nan_has_no_reference(tmp_path: Path) -> None:
    from nibble.reference.compute import compute
    from nibble.reference.store import Request

    folder, out = tmp_path / "model", tmp_path / "reference.json"
    shutil.copytree(demo_models()["nibble-demo-nvfp4"], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    request = Request("demo", str(folder), str(out), "bf16", answer_tokens=1)
    with pytest.raises(Unsupported, match="computes NaN or infinity"):
        compute(request, lambda layer, of: None)
    assert not out.exists()


def test_a_buffer_that_nothing_fills_is_unsupported_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel

    monkeypatch.setattr(Qwen3PreTrainedModel, "_init_weights", lambda self, module: None)
    with pytest.raises(
        Unsupported, match=r"transformers leaves model.rotary_emb.inv_freq without values"
    ):
        streamed(demo_models()["nibble-demo-nvfp4"])


def test_what_transformers_has_no_module_of_is_unsupported_in_one_line(tmp_path: Path) -> None:
    source = demo_models()["nibble-demo-nvfp4"]
    shutil.copytree(source, tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    config |= {
        "architectures": ["BirdForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "bird.Bird"},
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        Unsupported, match="no module BirdForCausalLM; nibble does not run the checkpoint's code"
    ):
        streamed(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    shutil.copy(source / "config.json", tmp_path / "model")
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(Unsupported, match=r"no tensor for model.layers.1.self_attn.q_norm.weight"):
        streamed(tmp_path / "model")


def test_fp8_inputs_are_rounded_to_their_static_scale() -> None:
    x = torch.tensor([[1.0, 300.0, -1000.0]])
    assert rounded_input(x, ("fp8", 0.5)).tolist() == [[1.0, 224.0, -224.0]]


def test_fp8_weights_are_dequantized_by_blocks_whose_last_one_is_smaller(tmp_path: Path) -> None:
    assert [block_size(576, 5), block_size(256, 2), block_size(576, 9), block_size(100, 1)] == [
        128,
        128,
        64,
        128,
    ]


def test_what_a_server_may_round_to_fp8_or_not_is_noise() -> None:
    x, weight = torch.randn(64, 256).bfloat16().float(), torch.randn(32, 256)
    plain = torch.nn.functional.linear(x, weight)
    for how in ((BY_TOKEN, 0.0), ("fp8", 0.01)):
        setattr(weight, INPUT, how)
        with RoundedInputs():
            right = torch.nn.functional.linear(x, weight)
            with InBf16():
                other = torch.nn.functional.linear(x, weight)
        assert torch.equal(right, plain) == (how[0] == BY_TOKEN)
        assert 0.01 < float((other - right).norm() / right.norm()) < 0.06
