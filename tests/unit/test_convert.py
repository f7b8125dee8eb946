"""`nibble convert`: layouts exactly, BF16 to NVFP4, what does not fit, interruptions."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from nibble_kernels.scale_layout import untile
from nibble_kernels.weight_quant import Nvfp4Weight, dequantize, quantize
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nibble.checkpoint import read_checkpoint
from nibble.checkpoint.convert import Wishes, convert
from nibble.checkpoint.convert.config import ignore_list
from nibble.checkpoint.convert.layouts import reciprocal
from nibble.cli.app import app
from nibble.cli.failures import guarded
from nibble.errors import ExitCode, NibbleError
from tests.support.models.tiny_checkpoint import OTHER_FAMILY
from tests.support.paths import ROOT
from tests.support.refusals import refusal_of

H, EXPERTS = 128, 4
LAYER = "model.layers.0"
SHAPES = {
    "self_attn.q_proj": (H, H),
    "self_attn.k_proj": (H, H),
    "self_attn.v_proj": (H, H),
    "self_attn.o_proj": (H, H),
    "mlp.gate_proj": (2 * H, H),
    "mlp.up_proj": (2 * H, H),
    "mlp.down_proj": (H, 2 * H),
}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": H,
    "intermediate_size": 2 * H,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
    "dtype": "bfloat16",
}
DEMO = ROOT / "models"


def bf16_tensors(shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    found = {f"{LAYER}.{name}.weight": torch.randn(shape, generator=generator).bfloat16() / (n + 3)
             for n, (name, shape) in enumerate(shapes.items())}  # fmt: skip
    found |= {"model.embed_tokens.weight": torch.randn(128, H, generator=generator).bfloat16()}
    found |= {"lm_head.weight": torch.randn(128, H, generator=generator).bfloat16()}
    return found | {f"{LAYER}.input_layernorm.weight": torch.ones(H).bfloat16()}


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] = CONFIG) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "custom").mkdir()
    (folder / "custom/notes.txt").write_text("kept")
    return folder


@pytest.fixture
def bf16(tmp_path: Path) -> Path:
    return write(tmp_path / "bf16", bf16_tensors())


@pytest.fixture
def w4a16(bf16: Path, tmp_path: Path) -> Path:
    return convert(str(bf16), tmp_path / "w4a16", "nvfp4").dest


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def with_unequal_scales(folder: Path) -> Path:
    """Global scales as quantizers leave them: any float32, different in each layer; and input
    scales: W4A4.
    """
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(8)
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("weight_scale_2")]:
        tensors[name] *= 1 + torch.rand((), generator=generator)
        tensors[name.replace("weight_scale_2", "input_scale")] = (
            torch.rand((), generator=generator) + 0.1
        )
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    config["quantization_config"] |= {
        "quant_algo": "NVFP4",
        "config_groups": {
            "group_0": {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    return abs(int(a.reshape(()).view(torch.int32)) - int(b.reshape(()).view(torch.int32)))


# --- layouts --------------------------------------------------------------------------------------


def test_modelopt_to_compressed_tensors_and_back_keeps_codes_and_block_scales_and_globals_to_an_ulp(
    w4a16: Path, tmp_path: Path
) -> None:
    source = with_unequal_scales(w4a16)
    there = convert(str(source), tmp_path / "ct", "compressed-tensors").dest
    back = convert(str(there), tmp_path / "back", "modelopt").dest
    before, after = tensors_of(source), tensors_of(back)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (tensor.dtype, tensor.shape) == (after[name].dtype, after[name].shape)
        if name.endswith(("weight_scale_2", "input_scale")):
            assert ulps(tensor, after[name]) <= 1
        else:
            assert bits(tensor) == bits(after[name])
    assert read_checkpoint(str(back)).scheme.name == "NVFP4"
    again = convert(str(back), tmp_path / "ct again", "compressed-tensors").dest
    third = convert(str(again), tmp_path / "third", "modelopt").dest
    assert (third / "model.safetensors").read_bytes() == (back / "model.safetensors").read_bytes()


def test_a_reciprocal_is_the_nearest_float_and_comes_back_within_an_ulp() -> None:
    values = (torch.rand(4000, generator=torch.Generator().manual_seed(5)) + 1) * 2.0**-17
    for value in values:
        inverse = torch.frombuffer(bytearray(reciprocal(bits(value))), dtype=torch.float32)
        assert float(inverse) == float((1 / value.double()).float())
        again = torch.frombuffer(bytearray(reciprocal(bits(inverse))), dtype=torch.float32)
        assert ulps(value, again) <= (0 if float(value) * 2**17 < 2**0.5 else 1)


def test_vllms_compressed_tensors_reads_what_we_write(w4a16: Path, tmp_path: Path) -> None:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig

    there = convert(str(with_unequal_scales(w4a16)), tmp_path / "ct", "compressed-tensors").dest
    declared = json.loads((there / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(declared).config_groups["group_0"]
    ours, theirs = tensors_of(w4a16), tensors_of(there)
    for name in SHAPES:
        module = f"{LAYER}.{name}"
        leaves = ("weight_packed", "weight_scale", "weight_global_scale")
        state = {leaf: theirs[f"{module}.{leaf}"] for leaf in leaves}
        read = NVFP4PackedCompressor.decompress(state, scheme)["weight"].float()
        exact = dequantize(
            Nvfp4Weight(
                *(ours[f"{module}.{leaf}"] for leaf in ("weight", "weight_scale", "weight_scale_2"))
            )
        )
        assert torch.allclose(read, exact, rtol=2**-8, atol=0)  # it rounds to BF16


def test_quartet_packed_has_tiled_scales_and_comes_back_byte_for_byte(
    w4a16: Path, tmp_path: Path
) -> None:
    there = convert(str(w4a16), tmp_path / "quartet", "quartet-packed").dest
    found = read_checkpoint(str(there))
    assert (
        found.scheme.name == "quartet2-packed"
        and found.tensors[f"{LAYER}.mlp.up_proj.weight"].dtype == "F4"
    )
    ours, theirs = tensors_of(w4a16), tensors_of(there)
    name = f"{LAYER}.mlp.up_proj.weight_scale"
    assert bits(theirs[name]) != bits(ours[name])
    assert bits(untile(theirs[name].view(torch.uint8), 2 * H, H // 16)) == bits(ours[name])
    back = convert(str(there), tmp_path / "back", "modelopt").dest
    for file in ("model.safetensors", "config.json", "hf_quant_config.json"):
        assert (back / file).read_bytes() == (w4a16 / file).read_bytes()


def test_bf16_activations_drop_the_scales_of_a_w4a4_checkpoint(w4a16: Path, tmp_path: Path) -> None:
    source = with_unequal_scales(w4a16)
    found = convert(str(source), tmp_path / "a16", "modelopt", Wishes(activations="bf16")).dest
    assert read_checkpoint(str(found)).scheme.name == "W4A16_NVFP4"
    kept = {name: t for name, t in tensors_of(source).items() if not name.endswith("input_scale")}
    after = tensors_of(found)
    assert kept.keys() == after.keys() and all(bits(kept[n]) == bits(after[n]) for n in kept)


def test_kv_scales_get_the_other_layouts_names(w4a16: Path, tmp_path: Path) -> None:
    tensors = tensors_of(w4a16)
    tensors |= {f"{LAYER}.self_attn.{c}_proj.{c}_scale": torch.tensor(0.5) for c in "kv"}
    save_file(tensors, w4a16 / "model.safetensors")
    config = json.loads((w4a16 / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {
        "dynamic": False,
        "num_bits": 8,
        "type": "float",
    }
    (w4a16 / "config.json").write_text(json.dumps(config))
    there = convert(str(w4a16), tmp_path / "ct", "compressed-tensors").dest
    assert {f"{LAYER}.self_attn.{c}_scale" for c in "kv"} <= tensors_of(there).keys()
    assert (
        json.loads((there / "config.json").read_text())["quantization_config"]["kv_cache_scheme"][
            "num_bits"
        ]
        == 8
    )
    back = convert(str(there), tmp_path / "back", "modelopt").dest
    assert tensors_of(back).keys() == tensors.keys()


def test_shards_stay_shards_and_other_files_are_copied(bf16: Path, tmp_path: Path) -> None:
    tensors = tensors_of(bf16)
    (bf16 / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, inside in shards.items():
        save_file({name: tensors[name] for name in inside}, bf16 / file)
    weight_map = {name: file for file, inside in shards.items() for name in inside}
    (bf16 / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    made = convert(str(bf16), tmp_path / "made", "nvfp4").dest
    index = json.loads((made / "model.safetensors.index.json").read_text())
    stored = {}
    for file in shards:
        with safe_open(made / file, "pt") as opened:
            stored |= dict.fromkeys(opened.keys(), file)
    assert index["weight_map"] == stored
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(made).values())
    assert (made / "custom/notes.txt").read_text() == "kept"
    assert (made / "tokenizer.json").exists()


def test_recorded_answers_stay_with_the_numbers_they_were_recorded_of(
    bf16: Path, tmp_path: Path
) -> None:
    (bf16 / "nibble-canary.json").write_text("{}")
    made = convert(str(bf16), tmp_path / "made", "nvfp4").dest
    assert not (made / "nibble-canary.json").exists()
    (made / "nibble-canary.json").write_text("{}")
    assert (
        convert(str(made), tmp_path / "other", "compressed-tensors").dest / "nibble-canary.json"
    ).exists()


def test_ignore_lists_are_translated_and_say_what_the_tensors_say() -> None:
    config = {
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head", "vision*", "wrong.q_proj"],
        }
    }
    quantized = ["wrong.q_proj", "a.experts.0.up_proj"]
    plain = [
        "lm_head",
        "vision.a",
        "router",
        "b.experts.0.up_proj",
        "b.experts.1.up_proj",
        "a.experts.1.up_proj",
    ]
    found = ignore_list("compressed-tensors", config, None, quantized, plain)
    assert found == sorted(
        ["lm_head", "re:vision.*$", "router", "re:b\\.experts\\..*", "a.experts.1.up_proj"]
    )
    compressed = {"quantization_config": {"quant_method": "compressed-tensors", "ignore": found}}
    back = ignore_list("modelopt", compressed, None, quantized, plain)
    assert back == sorted(["lm_head", "vision.a", "router", "b.experts.*", "a.experts.1.up_proj"])


# --- BF16 to NVFP4 --------------------------------------------------------------------------------


def test_weights_are_the_quantizers_with_one_scale_for_layers_that_are_fused(
    bf16: Path, w4a16: Path
) -> None:
    source, found = tensors_of(bf16), tensors_of(w4a16)
    for leaves in (
        ("q_proj", "k_proj", "v_proj"),
        ("gate_proj", "up_proj"),
        ("o_proj",),
        ("down_proj",),
    ):
        modules = [f"{LAYER}.{name}" for name in SHAPES if name.endswith(leaves)]
        amax = (
            torch.stack([source[f"{module}.weight"].abs().amax() for module in modules])
            .amax()
            .float()
        )
        for module in modules:
            expected = quantize(source[f"{module}.weight"], amax)
            for leaf, tensor in zip(
                ("weight", "weight_scale", "weight_scale_2"), expected, strict=True
            ):
                assert bits(found[f"{module}.{leaf}"]) == bits(tensor)
    for name in ("model.embed_tokens.weight", "lm_head.weight", f"{LAYER}.input_layernorm.weight"):
        assert bits(found[name]) == bits(source[name])
    assert not [name for name in found if name.endswith("input_scale")]
    checkpoint = read_checkpoint(str(w4a16))
    assert checkpoint.scheme.name == "W4A16_NVFP4" and not checkpoint.problems


def test_four_over_six_uses_scales_for_256(bf16: Path, tmp_path: Path) -> None:
    found = tensors_of(
        convert(str(bf16), tmp_path / "made", "nvfp4", Wishes(four_over_six=True)).dest
    )
    module = f"{LAYER}.mlp.down_proj"
    amax = tensors_of(bf16)[f"{module}.weight"].abs().amax().float()
    assert float(found[f"{module}.weight_scale_2"]) == float(amax / (6 * 256))


def test_excluded_modules_stay_and_are_listed(bf16: Path, tmp_path: Path) -> None:
    made = convert(str(bf16), tmp_path / "made", "nvfp4", Wishes(exclude=("*.self_attn.*",))).dest
    found = tensors_of(made)
    assert found[f"{LAYER}.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert found[f"{LAYER}.mlp.up_proj.weight"].dtype == torch.uint8
    ignore = json.loads((made / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignore == sorted(["lm_head", *(f"{LAYER}.self_attn.{c}_proj" for c in "kqvo")])


def test_a_whole_fused_layer_may_be_excluded_part_by_part(bf16: Path, tmp_path: Path) -> None:
    wishes = Wishes(exclude=("*.q_proj", "*.[kv]_proj", "lm_head"))
    made = convert(str(bf16), tmp_path / "made", "nvfp4", wishes).dest
    found = read_checkpoint(str(made))
    assert {weight.module.rpartition(".")[2] for weight in found.nvfp4} == {
        "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert found.problems == ()


def test_experts_of_an_unknown_form_may_be_excluded(tmp_path: Path) -> None:
    tensors = bf16_tensors() | {
        f"{LAYER}.mlp.experts.gate_up_proj": torch.ones(EXPERTS, H, H).bfloat16()
    }
    folder = write(tmp_path / "odd", tensors)
    line = refused(ExitCode.CONFIG, str(folder), tmp_path / "x", "nvfp4")
    assert "--exclude '*.experts.*'" in line
    made = convert(str(folder), tmp_path / "x", "nvfp4", Wishes(exclude=("*.experts.*",))).dest
    assert tensors_of(made)[f"{LAYER}.mlp.experts.gate_up_proj"].dtype == torch.bfloat16


def test_experts_in_one_tensor_become_experts_one_by_one(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.experts.gate_up_proj": (EXPERTS, 64, H),
        "mlp.experts.down_proj": (EXPERTS, H, 32),
    }
    source = {name.replace("_proj.weight", "_proj"): t for name, t in bf16_tensors(shapes).items()}
    folder = write(tmp_path / "moe", source, CONFIG | {"num_experts": EXPERTS})
    found = tensors_of(convert(str(folder), tmp_path / "made", "nvfp4").dest)
    stacked = source[f"{LAYER}.mlp.experts.gate_up_proj"]
    for expert in range(EXPERTS):
        amax = stacked[expert].abs().amax().float()
        for name, rows in (("gate_proj", stacked[expert, :32]), ("up_proj", stacked[expert, 32:])):
            expected = quantize(rows, amax)
            module = f"{LAYER}.mlp.experts.{expert}.{name}"
            assert bits(found[f"{module}.weight"]) == bits(expected.packed)
            assert bits(found[f"{module}.weight_scale_2"]) == bits(expected.global_scale)
    assert found[f"{LAYER}.mlp.experts.3.down_proj.weight"].shape == (H, 16)


def test_activation_scales_come_from_the_inputs_that_texts_give(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = ("What is NVFP4?", "a second text")
    made = convert("nibble-demo", tmp_path / "made", "nvfp4", Wishes("fp4", texts=texts)).dest
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO / "nibble-demo", dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "nibble-demo")
    seen = []
    model.model.layers[2].input_layernorm.register_forward_hook(
        lambda _m, _a, out: seen.append(out.abs().max())
    )
    for text in texts:
        model(tokenizer(text, return_tensors="pt").input_ids)
    expected = torch.stack(seen).max().float() / 2688
    found = tensors_of(made)
    for name in "qkv":
        assert float(found[f"model.layers.2.self_attn.{name}_proj.input_scale"]) == expected.item()
    checkpoint = read_checkpoint(str(made))
    assert checkpoint.scheme.name == "NVFP4" and not checkpoint.problems


# --- refusals -------------------------------------------------------------------------------------


def refused(code: ExitCode, *words: Any) -> str:
    return refusal_of(lambda: convert(*words), code).line()


def test_a_source_that_is_not_there_is_exit_4(tmp_path: Path) -> None:
    assert str(tmp_path / "no") in refused(
        ExitCode.MODEL, str(tmp_path / "no"), tmp_path / "x", "modelopt"
    )


def test_an_id_that_was_not_pulled_is_exit_4_without_asking_the_network(tmp_path: Path) -> None:
    assert "nibble pull no/such" in refused(ExitCode.MODEL, "no/such", tmp_path / "x", "modelopt")


def test_a_destination_that_is_there_is_exit_2_and_stays(bf16: Path, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    refused(ExitCode.USAGE, str(bf16), tmp_path / "x", "nvfp4")
    assert list((tmp_path / "x").iterdir()) == []


def test_columns_that_are_no_multiple_of_16_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "odd", bf16_tensors({"mlp.up_proj": (32, 24)}))
    line = refused(ExitCode.CONFIG, str(folder), tmp_path / "x", "nvfp4")
    assert f"{LAYER}.mlp.up_proj.weight has 24 input features" in line and "--exclude" in line
    assert not (tmp_path / "x").exists()


def test_a_head_that_is_tied_may_be_excluded_too(tmp_path: Path) -> None:
    source = {
        name: tensor for name, tensor in bf16_tensors().items() if not name.startswith("lm_head")
    }
    folder = write(tmp_path / "tied", source, CONFIG | {"tie_word_embeddings": True})
    assert convert(str(folder), tmp_path / "x", "nvfp4", Wishes(exclude=("lm_head",))).weights == 7


@pytest.mark.parametrize("pattern", ["down_proj", "*nothing*", "", f"{LAYER}.mlp"])
def test_a_pattern_that_matches_no_module_is_named(
    pattern: str, bf16: Path, tmp_path: Path
) -> None:
    wishes = Wishes(exclude=("*.o_proj", pattern))
    line = refused(ExitCode.USAGE, str(bf16), tmp_path / "x", "nvfp4", wishes)
    assert f"--exclude {pattern!r} matches no module" in line
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("pattern", "left_out", "other"),
    [
        ("*.q_proj", "self_attn.q_proj", "self_attn.k_proj"),
        ("*.up_proj", "mlp.up_proj", "mlp.gate_proj"),
    ],
)
def test_a_part_of_a_fused_layer_is_not_excluded_alone(
    pattern: str, left_out: str, other: str, bf16: Path, tmp_path: Path
) -> None:
    line = refused(ExitCode.USAGE, str(bf16), tmp_path / "x", "nvfp4", Wishes(exclude=(pattern,)))
    assert f"--exclude matches {LAYER}.{left_out} but not {LAYER}.{other}" in line


@pytest.mark.parametrize(
    "pattern", ["*.experts.0.*", "*.experts.*.gate_proj", "*.experts.down_proj"]
)
def test_some_experts_of_a_layer_are_not_excluded_alone(pattern: str, tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.experts.gate_up_proj": (EXPERTS, 64, H),
        "mlp.experts.down_proj": (EXPERTS, H, 32),
    }
    source = {name.replace("_proj.weight", "_proj"): t for name, t in bf16_tensors(shapes).items()}
    folder = write(tmp_path / "moe", source, CONFIG | {"num_experts": EXPERTS})
    line = refused(ExitCode.USAGE, str(folder), tmp_path / "x", "nvfp4", Wishes(exclude=(pattern,)))
    assert f"all or nothing of {LAYER}.mlp.experts, which vLLM builds as one layer" in line


def test_quartet_packed_needs_multiples_of_128(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "bf16", bf16_tensors({"mlp.up_proj": (64, 128)}), CONFIG | OTHER_FAMILY
    )
    made = convert(str(folder), tmp_path / "made", "nvfp4").dest
    assert "[64, 128]" in refused(ExitCode.CONFIG, str(made), tmp_path / "x", "quartet-packed")


def test_quartet_packed_has_no_place_for_activation_scales(w4a16: Path, tmp_path: Path) -> None:
    line = refused(
        ExitCode.CONFIG, str(with_unequal_scales(w4a16)), tmp_path / "x", "quartet-packed"
    )
    assert "--activations bf16" in line


def test_a_bf16_model_has_no_layout_to_change_and_an_nvfp4_one_is_not_quantized_again(
    bf16: Path, w4a16: Path, tmp_path: Path
) -> None:
    assert "--to nvfp4" in refused(ExitCode.CONFIG, str(bf16), tmp_path / "x", "modelopt")
    assert "--to modelopt" in refused(ExitCode.CONFIG, str(w4a16), tmp_path / "x", "nvfp4")


def test_an_fp8_layer_among_nvfp4_ones_is_named(w4a16: Path, tmp_path: Path) -> None:
    tensors = tensors_of(w4a16)
    module = f"{LAYER}.self_attn.o_proj"
    del tensors[f"{module}.weight_scale_2"]
    tensors[f"{module}.weight"] = torch.ones(H, H).to(torch.float8_e4m3fn)
    tensors[f"{module}.weight_scale"] = torch.tensor(1.0)
    save_file(tensors, w4a16 / "model.safetensors")
    config = json.loads((w4a16 / "config.json").read_text())
    names = {f"{LAYER}.{name}": {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in SHAPES}
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": names | {module: {"quant_algo": "FP8"}},
    }
    (w4a16 / "config.json").write_text(json.dumps(config))
    assert f"{module}.weight is F8_E4M3" in refused(
        ExitCode.CONFIG, str(w4a16), tmp_path / "x", "compressed-tensors"
    )


def test_a_damaged_scale_is_exit_4_with_the_tensors_name(w4a16: Path, tmp_path: Path) -> None:
    tensors = tensors_of(w4a16)
    tensors[f"{LAYER}.mlp.up_proj.weight_scale"].view(torch.uint8)[3, 1] = 0x7F
    save_file(tensors, w4a16 / "model.safetensors")
    line = refused(ExitCode.MODEL, str(w4a16), tmp_path / "x", "compressed-tensors")
    assert f"{LAYER}.mlp.up_proj.weight_scale" in line


def test_a_weight_that_is_not_finite_is_exit_4_with_the_tensors_name(
    bf16: Path, tmp_path: Path
) -> None:
    tensors = tensors_of(bf16)
    tensors[f"{LAYER}.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, bf16 / "model.safetensors")
    assert f"{LAYER}.mlp.up_proj.weight" in refused(
        ExitCode.MODEL, str(bf16), tmp_path / "x", "nvfp4"
    )


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--to", "gguf"], 2),
        (["--to", "nvfp4", "--activations", "fp4"], 2),
        (["--to", "nvfp4", "--activations", "int8"], 2),
        (["--to", "modelopt", "--four-over-six"], 2),
        (["--to", "nvfp4", "--calibrate", "/no/such/file"], 2),
        (["--to", "modelopt"], 5),
        ([], 2),
    ],
)
def test_words_that_do_not_fit_are_one_line(
    words: list[str], code: int, bf16: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = guarded(
        lambda: app(["convert", str(bf16), str(tmp_path / "x"), *words], standalone_mode=False)
    )
    assert found == code
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "Errno" not in told


# --- interruption ---------------------------------------------------------------------------------

LIMITED = """
import resource, sys
from pathlib import Path
from nibble.cli.app import main
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
sys.argv = ["nibble", "convert", sys.argv[1], sys.argv[2], "--to", "nvfp4"]
main()
"""


def test_a_full_disk_leaves_nothing_and_is_one_line(bf16: Path, tmp_path: Path) -> None:
    assert resource.RLIMIT_FSIZE is not None
    # -B: a compiled module that ended at the limit would be read by every later process.
    words = [sys.executable, "-B", "-c", LIMITED, str(bf16), str(tmp_path / "out" / "x")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.NO_FIT, done.stderr
    assert "writing" in done.stderr and "Traceback" not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_weights_in_other_formats_are_not_copied(bf16: Path, tmp_path: Path) -> None:
    """A repository often has its weights twice; the copy would be larger than the new model."""
    (bf16 / "original").mkdir()
    for name in ("original/consolidated.00.pth", "pytorch_model.bin", "model.gguf"):
        (bf16 / name).write_bytes(b"weights")
    (bf16 / "original/params.json").write_text("{}")
    done = convert(str(bf16), tmp_path / "out", "nvfp4").dest
    assert (done / "original/params.json").is_file() and (done / "custom/notes.txt").is_file()
    assert not list(done.rglob("*.pth")) + list(done.glob("*.bin")) + list(done.glob("*.gguf"))


def test_a_folder_without_safetensors(bf16: Path, tmp_path: Path) -> None:
    (bf16 / "model.safetensors").rename(bf16 / "pytorch_model.bin")
    with pytest.raises(NibbleError) as caught:
        convert(str(bf16), tmp_path / "out", "nvfp4")
    assert caught.value.code == ExitCode.MODEL
    assert "has no safetensors files, only pytorch_model.bin" in caught.value.line()


def test_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora/adapter_config.json").write_text("{}")
    with pytest.raises(NibbleError) as caught:
        convert(str(tmp_path / "lora"), tmp_path / "out", "nvfp4")
    assert caught.value.code == ExitCode.CONFIG
    assert "is an adapter (LoRA), not a model" in caught.value.line()
