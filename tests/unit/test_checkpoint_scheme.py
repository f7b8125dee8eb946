"""Every quantization scheme is recognised by config and tensors, and contradictions between them
are said.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nibble.checkpoint import Scheme, read_checkpoint
from nibble.checkpoint.detect_scheme import detect_scheme
from tests.support.models.tiny_checkpoint import Tensors, linear, tensors, write_checkpoint
from tests.support.models.tiny_model import MODELOPT_NVFP4

INPUTS = {
    "num_bits": 4,
    "type": "float",
    "group_size": 16,
    "strategy": "tensor_group",
    "dynamic": "local",
}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


def hf_quant(algorithm: str | None, producer: str = "modelopt", **more: Any) -> dict[str, Any]:
    inner = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }
    return {"producer": {"name": producer, "version": "0.29.0"}, "quantization": inner | more}


def group(inputs: Any = None, **weights: Any) -> dict[str, Any]:
    return {
        "targets": ["Linear"],
        "weights": INPUTS | {"dynamic": False} | weights,
        "input_activations": inputs,
    }


def compressed(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    named = {f"group_{i}": each for i, each in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": named,
        **more,
    }


def scheme(
    folder: Path, weights: Tensors | None, quantization: Any = None, hf: Any = None, **config: Any
) -> Scheme:
    config = config | ({"quantization_config": quantization} if quantization else {})
    return read_checkpoint(str(write_checkpoint(folder, weights, config, hf))).scheme


MIXED = modelopt(
    "MIXED_PRECISION",
    quantized_layers={
        "model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
    },
)
FORMS: dict[str, tuple[str, Any, tuple[str, str | None, int, str, bool]]] = {
    "bf16": ("bf16", None, ("bf16", None, 16, "bf16", False)),
    "nvfp4": ("nvfp4", MODELOPT_NVFP4, ("NVFP4", "modelopt_fp4", 4, "fp4", True)),
    "w4a16": ("w4a16", modelopt("W4A16_NVFP4"), ("W4A16_NVFP4", "modelopt_fp4", 4, "bf16", True)),
    "fp8 modelopt": ("fp8", modelopt("FP8"), ("FP8", "modelopt", 8, "fp8", False)),
    "fp8 per channel": (
        "fp8",
        modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "modelopt", 8, "fp8", False),
    ),
    "fp8 blocks": ("fp8", modelopt("FP8_PB_WO"), ("FP8_PB_WO", "modelopt", 8, "fp8", False)),
    "mxfp8": ("fp8", modelopt("MXFP8"), ("MXFP8", "modelopt_mxfp8", 8, "fp8", False)),
    "mixed": ("nvfp4", MIXED, ("MIXED_PRECISION", "modelopt_mixed", 4, "fp4+fp8", True)),
    "ct nvfp4": (
        "ct_w4a4",
        compressed(group(INPUTS)),
        ("NVFP4", "compressed-tensors", 4, "fp4", True),
    ),
    "ct nvfp4a16": ("ct", compressed(group()), ("NVFP4A16", "compressed-tensors", 4, "bf16", True)),
    "ct mixed": (
        "ct_w4a4",
        compressed(group(INPUTS), {"weights": FP8, "input_activations": FP8}),
        ("FP8+NVFP4", "compressed-tensors", 4, "fp4+fp8", True),
    ),
    "ct fp8": (
        "fp8",
        compressed({"weights": FP8, "input_activations": FP8}),
        ("FP8", "compressed-tensors", 8, "fp8", False),
    ),
    "ct int4": (
        "awq",
        compressed({"weights": {"num_bits": 4, "type": "int", "group_size": 128}}),
        ("W4A16", "compressed-tensors", 4, "bf16", False),
    ),
    "fp8": (
        "fp8",
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        ("fp8", "fp8", 8, "fp8", False),
    ),
    "gptq": (
        "gptq",
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        ("int4-gptq", "gptq", 4, "bf16", False),
    ),
    "awq": (
        "awq",
        {"quant_method": "awq", "bits": 4, "group_size": 32},
        ("int4-awq", "awq", 4, "bf16", False),
    ),
    "mxfp4": ("bf16", {"quant_method": "mxfp4"}, ("mxfp4", "mxfp4", 4, "bf16", False)),
    "bitsandbytes": (
        "bf16",
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        ("bitsandbytes", None, 4, "bf16", False),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_scheme_is_recognised(name: str, tmp_path: Path) -> None:
    form, quantization, expected = FORMS[name]
    found = scheme(tmp_path, tensors(form), quantization)
    assert (
        found.name,
        found.vllm_quantization,
        found.weight_bits,
        found.activations,
        found.is_nvfp4,
    ) == expected
    assert bool(found.unsupported_reason) == (found.vllm_quantization is None and name != "bf16")
    assert found.notes == ()


@pytest.mark.parametrize(("dtype", "name", "bits"), [("F16", "fp16", 16), ("F32", "fp32", 32)])
def test_plain_weights_are_named_by_their_tensors_not_by_config(
    dtype: str, name: str, bits: int, tmp_path: Path
) -> None:
    found = scheme(tmp_path, {"model.norm.weight": (dtype, [64])})
    assert (found.name, found.weight_bits) == (name, bits)
    assert found.notes == (f"weights are {name} and config.json says bfloat16",)


def test_nvfp4_without_input_scales_is_the_old_weight_only_label(tmp_path: Path) -> None:
    found = scheme(tmp_path, tensors("w4a16"), MODELOPT_NVFP4)
    assert (found.name, found.activations, found.is_nvfp4) == ("W4A16_NVFP4", "bf16", True)
    assert found.is_relabelled and found.unsupported_reason == ""
    assert "served weight-only" in found.notes[0]


def test_one_missing_input_scale_is_no_weight_only_export(tmp_path: Path) -> None:
    weights = tensors("nvfp4")
    del weights["model.layers.0.mlp.up_proj.input_scale"]
    found = scheme(tmp_path, weights, MODELOPT_NVFP4)
    assert (found.name, found.activations, found.is_relabelled) == ("NVFP4", "fp4", False)


def test_nvfp4_whose_groups_have_no_activations_is_weight_only(tmp_path: Path) -> None:
    quantization = modelopt(
        "NVFP4", config_groups={"group_0": {"weights": INPUTS, "targets": ["Linear"]}}
    )
    found = scheme(tmp_path, tensors("w4a16"), quantization)
    assert (found.name, found.unsupported_reason) == ("W4A16_NVFP4", "")


@pytest.mark.parametrize(("algorithm", "form"), [("NVFP4", "nvfp4"), ("FP8", "fp8")])
def test_old_hf_quant_config_alone_is_enough_for_vllm(
    algorithm: str, form: str, tmp_path: Path
) -> None:
    found = scheme(tmp_path, tensors(form), hf=hf_quant(algorithm))
    assert (found.name, found.unsupported_reason) == (algorithm, "")
    assert "only hf_quant_config.json" in found.notes[0]


@pytest.mark.parametrize("algorithm", ["W4A16_NVFP4", "MXFP8"])
def test_algorithm_that_vllm_does_not_read_from_hf_quant_config_alone_is_supported(
    algorithm: str, tmp_path: Path
) -> None:
    found = scheme(tmp_path, tensors("w4a16"), hf=hf_quant(algorithm))
    assert (found.name, found.unsupported_reason) == (algorithm, "")


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", "NVFP4_SVD"])
def test_modelopt_algorithm_unknown_to_vllm_is_unsupported(algorithm: str, tmp_path: Path) -> None:
    found = scheme(tmp_path, tensors("nvfp4"), modelopt(algorithm))
    assert (found.name, found.is_nvfp4) == (algorithm, True)
    assert "W4A16_NVFP4" in found.unsupported_reason


@pytest.mark.parametrize("quantization", [None, {}, {"quant_algo": None, "group_size": 16}])
def test_a_modelopt_config_without_an_algorithm_is_told_so(
    quantization: Any, tmp_path: Path
) -> None:
    found = scheme(
        tmp_path,
        tensors("nvfp4"),
        hf={"producer": {"name": "modelopt"}, "quantization": quantization},
    )
    assert found.unsupported_reason.startswith(
        "its quantization config names no quant_algo; vLLM 0.32 reads"
    )


@pytest.mark.parametrize("size", ["16", 16.0, None])
def test_a_group_size_that_vllm_reads_as_16_is_fine(size: Any, tmp_path: Path) -> None:
    assert (
        scheme(
            tmp_path / "hf", tensors("nvfp4"), hf=hf_quant("NVFP4", group_size=size)
        ).unsupported_reason
        == ""
    )
    config = modelopt("NVFP4", group_size=size)
    assert scheme(tmp_path / "config", tensors("nvfp4"), config).unsupported_reason == ""


@pytest.mark.parametrize("size", ["32", 32, "sixteen", [16]])
def test_another_group_size_is_told_as_the_config_has_it(size: Any, tmp_path: Path) -> None:
    reason = scheme(
        tmp_path, tensors("nvfp4"), hf=hf_quant("NVFP4", group_size=size)
    ).unsupported_reason
    assert reason == f"its config says groups of {size}, and NVFP4 has groups of 16"


def test_packed_weights_without_any_quantization_config_are_not_called_bf16(tmp_path: Path) -> None:
    found = scheme(tmp_path, tensors("w4a16"))
    assert found.is_nvfp4
    assert "no quantization_config" in found.unsupported_reason


def test_compressed_w4a4_without_global_input_scales_is_weight_only(tmp_path: Path) -> None:
    found = scheme(tmp_path, tensors("ct"), compressed(group(INPUTS)))
    assert (found.name, found.activations, found.is_relabelled) == ("NVFP4A16", "bf16", True)


def test_unknown_method_is_named(tmp_path: Path) -> None:
    found = scheme(tmp_path, tensors("bf16"), {"quant_method": "marmalade"})
    assert found.unsupported_reason == "vLLM 0.32 has no quantization method 'marmalade'"


def test_cloverlm_packed_and_bf16_are_told_apart_by_their_tensors(tmp_path: Path) -> None:
    hf = hf_quant("NVFP4", "cloverlm_converter")
    packed = scheme(tmp_path / "a", tensors("quartet2"), hf=hf, model_type="cloverlm")
    plain = scheme(tmp_path / "b", tensors("bf16"), model_type="cloverlm")
    assert (packed.name, packed.is_nvfp4, packed.weight_bits) == ("quartet2-packed", True, 4)
    assert "128x4 tiled" in packed.notes[0]
    assert (plain.name, plain.is_nvfp4, plain.weight_bits) == ("quartet2-bf16", False, 16)


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (
            modelopt("NVFP4", kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False}),
            "fp8_e4m3",
        ),
        (modelopt("NVFP4", kv_cache_scheme="NVFP4"), "nvfp4"),
        (modelopt("NVFP4"), None),
        (compressed(group(INPUTS), kv_cache_scheme={"num_bits": 8, "type": "float"}), "fp8"),
        (compressed(group(INPUTS)), None),
    ],
)
def test_declared_kv_cache_is_vllms_name_for_it(declared: Any, expected: str | None) -> None:
    assert detect_scheme({"quantization_config": declared}, None, None).kv_cache == expected


def test_quantization_of_a_nested_text_config_counts(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_vl",
        "text_config": {"model_type": "qwen3_vl_text", "quantization_config": MODELOPT_NVFP4},
    }
    assert detect_scheme(config, None, None).name == "NVFP4"


def test_scheme_without_seen_weights_says_so() -> None:
    found = detect_scheme({"model_type": "qwen3", "torch_dtype": "float16"}, None, None)
    assert (found.name, found.detail) == ("fp16", "by config.json; weights not seen")


def test_quantized_lm_head_does_not_change_the_scheme(tmp_path: Path) -> None:
    weights = tensors("nvfp4")
    del weights["lm_head.weight"]
    weights |= linear("lm_head", 128, 64, "nvfp4")
    assert scheme(tmp_path, weights, MODELOPT_NVFP4).name == "NVFP4"


INT8_TOKENS = {
    "num_bits": 8,
    "type": "int",
    "strategy": "token",
    "dynamic": True,
    "symmetric": True,
}
UNREAD: dict[str, tuple[dict[str, Any], Any, str, str]] = {
    "int4, dynamic": ({"num_bits": 4, "dynamic": True}, None, "pack-quantized", "dynamically"),
    "int8, dynamic": (
        {"num_bits": 8, "dynamic": True},
        INT8_TOKENS,
        "int-quantized",
        "dynamically",
    ),
    "w8a8, asymmetric": (
        {"num_bits": 8, "symmetric": False},
        INT8_TOKENS,
        "int-quantized",
        "asymmetrically",
    ),
    "w8a8, symmetric": ({"num_bits": 8, "symmetric": True}, INT8_TOKENS, "int-quantized", ""),
    "w4a16, asymmetric (AWQ)": ({"num_bits": 4, "symmetric": False}, None, "pack-quantized", ""),
    "packed w4a8, asymmetric": (
        {"num_bits": 4, "symmetric": False},
        INT8_TOKENS,
        "pack-quantized",
        "",
    ),
}


@pytest.mark.parametrize("kind", UNREAD)
def test_integer_weights_that_vllm_has_no_scheme_for_are_refused(kind: str) -> None:
    weights, inputs, packing, word = UNREAD[kind]
    given = {"type": "int", "strategy": "channel"} | weights
    group = {"targets": ["Linear"], "weights": given, "input_activations": inputs}
    declared = {
        "quant_method": "compressed-tensors",
        "format": packing,
        "config_groups": {"group_0": group},
    }
    reason = detect_scheme({"quantization_config": declared}, None, None).unsupported_reason
    assert word in reason if word else reason == ""
