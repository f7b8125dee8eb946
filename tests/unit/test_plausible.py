"""Values of scales and norms that no exporter means are refused before a load; unlikely ones are
told with their figures.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from test_layer_tensors import COUNT, FORMS, qwen3

from nibble.checkpoint import Checkpoint, read_checkpoint
from nibble.checkpoint.plausible import LARGEST_WEIGHT, check_plausible
from nibble.checkpoint.scale_values import largest_scale, numbers
from nibble.checkpoint.verify import check_scales
from nibble.cli.inspection import inspect_model
from nibble.errors import ExitCode, NibbleError
from nibble.plan.gather import plan_for, read_wishes
from nibble.serve.preflight.model import check_experts_on_cpu, check_tokenizer, check_values
from tests.support.models.tiny_checkpoint import OTHER_FAMILY, Tensors, write_checkpoint
from tests.support.models.tiny_model import write_model, write_safetensors
from tests.support.paths import ROOT
from tests.support.refusals import refusal_of

DEMOS = ("nibble-demo-nvfp4", "nibble-demo-moe-nvfp4", "nibble-demo")
GLOBAL = {"nvfp4": "weight_scale_2", "ct": "weight_global_scale"}
UP = "model.layers.1.mlp.up_proj"
HEALTHY = 1.0 / 2688  # the largest weight is 1


def f32(value: float) -> bytes:
    return struct.pack("<f", value)


def model(
    folder: Path,
    form: str = "nvfp4",
    values: dict[str, bytes] | None = None,
    extra: Tensors | None = None,
    **config: Any,
) -> Checkpoint:
    """Three layers whose global scales are those of weights up to 1."""
    weights = qwen3(form) | (extra or {})
    stored = HEALTHY if form == "nvfp4" else 1 / HEALTHY
    scales = {
        name: f32(stored) for name in weights if form in GLOBAL and name.endswith(GLOBAL[form])
    }
    scales |= {
        name: b"\x7e" * (shape[0] * shape[1])
        for name, (_, shape) in weights.items()
        if name.endswith("weight_scale")
    }
    given = {"num_hidden_layers": COUNT} | (
        {"quantization_config": FORMS[form]} if FORMS[form] else {}
    )
    return read_checkpoint(
        str(write_checkpoint(folder, weights, given | config, None, scales | (values or {})))
    )


def refused(found: Checkpoint) -> NibbleError:
    def check() -> None:
        check_scales(found, with_draft=True)
        check_values(found, with_draft=True)

    return refusal_of(check, ExitCode.MODEL)


@pytest.mark.parametrize("name", DEMOS)
def test_the_demos_are_plausible(name: str) -> None:
    assert check_values(read_checkpoint(str(ROOT / "models" / name)), with_draft=True) == []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("largest", [0.01, 1.0, 100.0, 400.0])
def test_healthy_scales_of_small_and_large_weights_are_plausible(
    largest: float, form: str, tmp_path: Path
) -> None:
    scale = largest / 2688
    name = f"{UP}.{GLOBAL.get(form)}"
    values = {name: f32(scale if form == "nvfp4" else 1 / scale)} if form in GLOBAL else {}
    assert check_values(model(tmp_path / "m", form, values), with_draft=True) == []


@pytest.mark.parametrize("form", GLOBAL)
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("largest", [0.01, 1.0, 400.0])
def test_a_global_scale_stored_as_its_reciprocal_is_refused(
    largest: float, everywhere: bool, form: str, tmp_path: Path
) -> None:
    stored = 2688 / largest if form == "nvfp4" else largest / 2688
    names = [
        name
        for name in qwen3(form)
        if name.endswith(GLOBAL[form]) and (everywhere or name.startswith(UP))
    ]
    error = refused(model(tmp_path / "m", form, {name: f32(stored) for name in names}))
    assert GLOBAL[form] in error.what and "reciprocal" in error.expected
    assert f"{2688 * 2688 / largest:.3g}" in error.what
    assert ("more like it" in error.what) == everywhere


def test_block_scales_are_read_before_a_global_scale_is_called_too_large(tmp_path: Path) -> None:
    values = {f"{UP}.weight_scale_2": f32(100.0), f"{UP}.weight_scale": b"\x38" * 512}
    found = model(tmp_path / "m", values=values)
    assert 6 * 448 * 100 > LARGEST_WEIGHT > 6 * 1 * 100
    assert check_values(found, with_draft=True) == []
    assert largest_scale([b"\x00\x01", b"\x38\x07"]) == 1.0 and largest_scale([b"\0\0"]) == 0.0


@pytest.mark.parametrize("value", [1e-40, 2e-39, 3.3e38])
@pytest.mark.parametrize("leaf", ["weight_global_scale", "input_global_scale"])
def test_a_divisor_whose_reciprocal_overflows_is_refused(
    leaf: str, value: float, tmp_path: Path
) -> None:
    name = f"{UP}.{leaf}"
    error = refused(model(tmp_path / "m", "ct", {name: f32(value)}, {name: ("F32", [1])}))
    assert f"{UP}.{leaf}" in error.what and "reciprocal" in error.what


# --- the KV cache's scales ------------------------------------------------------------------------


def cached(
    folder: Path, form: str, dtype: str, values: dict[int, bytes], leaf: str = "k_scale"
) -> Checkpoint:
    names = [
        f"model.layers.{number}.self_attn.{part}_proj.{part}_scale"
        for number in range(COUNT)
        for part in "kv"
    ]
    width = 4 if dtype == "F32" else 2
    healthy = {
        name: {"F32": f32(0.01), "BF16": b"\x24\x3c", "F16": b"\x1f\x21"}[dtype] for name in names
    }
    assert all(len(data) == width for data in healthy.values())
    changed = {
        name: data
        for number, data in values.items()
        for name in names
        if f".{number}." in name and leaf in name
    }
    return model(folder, form, healthy | changed, {name: (dtype, [1]) for name in names})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("leaf", ["k_scale", "v_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_of_the_cache_that_is_no_positive_number_is_refused(
    value: float, leaf: str, form: str, tmp_path: Path
) -> None:
    error = refused(cached(tmp_path / "m", form, "F32", {1: f32(value)}, leaf))
    assert f"model.layers.1.self_attn.{leaf[0]}_proj.{leaf}" in error.what


@pytest.mark.parametrize(("dtype", "nan"), [("BF16", b"\xc0\x7f"), ("F16", b"\x00\x7e")])
def test_it_is_read_in_every_type(dtype: str, nan: bytes, tmp_path: Path) -> None:
    assert check_values(cached(tmp_path / "m", "bf16", dtype, {}), with_draft=True) == []
    assert "is nan" in refused(cached(tmp_path / "n", "bf16", dtype, {2: nan})).what
    assert numbers(b"\x80\x3f\x00\xc0", "BF16") == (1.0, -2.0) and numbers(b"\x00\x3c", "F16") == (
        1.0,
    )


@pytest.mark.parametrize(
    "leaf", ["kv_scale", "k_cache.scale", "v_cache.scale", "q.scale", "attn.k_scale", "q_scale"]
)
def test_it_is_read_under_every_name_that_vllm_knows(leaf: str, tmp_path: Path) -> None:
    name = f"model.layers.1.self_attn.{leaf}"
    found = model(tmp_path / "m", "bf16", {name: f32(float("nan"))}, {name: ("F32", [1])})
    assert f"{name} in " in refused(found).what


def test_a_scale_a_thousand_times_its_neighbours_is_told_with_the_figures(tmp_path: Path) -> None:
    layers = 6
    names = [f"model.layers.{number}.self_attn.k_proj.k_scale" for number in range(layers)]
    values = {name: f32(0.01 * (1 + number / 8)) for number, name in enumerate(names)}
    extra: Tensors = {name: ("F32", []) for name in names}
    folder = tmp_path / "m"
    write_checkpoint(folder, extra, OTHER_FAMILY, None, values)
    assert check_values(read_checkpoint(str(folder)), with_draft=True) == []
    write_checkpoint(folder, extra, OTHER_FAMILY, None, values | {names[4]: f32(10.0)})
    (line,) = check_values(read_checkpoint(str(folder)), with_draft=True)
    assert line.startswith(f"warning: {names[4]} has 10, and the median") and "0.013" in line
    found = inspect_model(read_wishes([str(folder)], {}), False)
    assert found.doubts == (line.removeprefix("warning: "),) and found.to_json()["doubts"] == list(
        found.doubts
    )


def test_weights_far_from_those_of_other_layers_are_told(tmp_path: Path) -> None:
    source = read_checkpoint(str(ROOT / "models/nibble-demo-nvfp4"))
    weight = next(w for w in source.nvfp4 if w.module.endswith("mlp.down_proj"))
    folder = shutil.copytree(ROOT / "models/nibble-demo-nvfp4", tmp_path / "m")
    assert weight.global_scale is not None
    with (folder / weight.global_scale.file).open("r+b") as file:
        file.seek(weight.global_scale.offset)
        (value,) = struct.unpack("<f", file.read(4))
        file.seek(weight.global_scale.offset)
        file.write(f32(value / 5000))
    lines = check_values(read_checkpoint(str(folder)), with_draft=True)
    assert len(lines) == 1 and weight.module in lines[0] and "weights of up to" in lines[0]


# --- zeros ----------------------------------------------------------------------------------------


def test_a_norm_of_zeros_is_refused_where_norms_multiply(tmp_path: Path) -> None:
    norm = "model.layers.1.post_attention_layernorm.weight"
    error = refused(model(tmp_path / "m", values={norm: bytes(128)}))
    assert norm in error.what and "holds only zeros" in error.what
    gemma = {"model_type": "gemma", "head_dim": 16}
    assert (
        check_values(model(tmp_path / "n", values={norm: bytes(128)}, **gemma), with_draft=True)
        == []
    )


def test_block_scales_of_zeros_in_every_weight_are_refused(tmp_path: Path) -> None:
    zeros = {
        name: bytes(shape[0] * shape[1])
        for name, (_, shape) in qwen3("nvfp4").items()
        if name.endswith("weight_scale")
    }
    assert "as all block scales do" in refused(model(tmp_path / "m", values=zeros)).what
    zeros.popitem()
    (line,) = check_values(model(tmp_path / "n", values=zeros), with_draft=True)
    assert f"{next(iter(zeros))} holds only zeros ({len(zeros) - 1} more like it)" in line


def test_block_scales_of_zeros_in_an_expert_are_plausible(tmp_path: Path) -> None:
    """No token may have reached it in training."""
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale"
    assert check_values(with_experts(tmp_path / "m", {name: bytes(512)}), with_draft=True) == []


def with_experts(folder: Path, values: dict[str, bytes]) -> Checkpoint:
    weights = qwen3("nvfp4", model_type="qwen3_moe", experts=8)
    healthy = {name: f32(HEALTHY) for name in weights if name.endswith("weight_scale_2")}
    healthy |= {
        n: b"\x7e" * (shape[0] * shape[1])
        for n, (_, shape) in weights.items()
        if n.endswith("weight_scale")
    }
    config = {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "moe_intermediate_size": 128,
        "num_hidden_layers": COUNT,
    }
    config["quantization_config"] = FORMS["nvfp4"]
    return read_checkpoint(str(write_checkpoint(folder, weights, config, None, healthy | values)))


def test_an_expert_far_below_the_others_is_usual_and_one_far_above_is_told(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_2"
    assert (
        check_values(with_experts(tmp_path / "m", {name: f32(HEALTHY / 1000)}), with_draft=True)
        == []
    )
    (line,) = check_values(
        with_experts(tmp_path / "n", {name: f32(HEALTHY * 1000)}), with_draft=True
    )
    assert "experts.3.up_proj has weights of up to 1e+03" in line


MTP_NORM, TOWER_NORM = (
    f"model.layers.{COUNT}.enorm.weight",
    "vision_tower.encoder.layers.0.norm1.weight",
)


def test_a_norm_of_a_draft_or_a_vision_tower_may_be_zero(tmp_path: Path) -> None:
    for name in (MTP_NORM, TOWER_NORM):
        found = model(
            tmp_path / name,
            "bf16",
            {name: bytes(128)},
            {name: ("BF16", [64])},
            num_nextn_predict_layers=1,
        )
        assert check_values(found, with_draft=False) == []
        if name == TOWER_NORM:
            assert check_values(found, with_draft=True) == []
        else:
            assert name in refused(found).what
        assert inspect_model(read_wishes([str(tmp_path / name)], {}), False).exit_code == 0


def test_a_scale_of_the_cache_of_a_draft_is_read_where_it_drafts(tmp_path: Path) -> None:
    name = f"model.layers.{COUNT}.self_attn.k_proj.k_scale"
    found = model(
        tmp_path / "m", "bf16", {name: f32(0.0)}, {name: ("F32", [1])}, num_nextn_predict_layers=1
    )
    assert check_values(found, with_draft=False) == []
    assert name in refused(found).what


def test_norms_of_zeros_throughout_a_family_that_is_not_known_are_told(tmp_path: Path) -> None:
    norms = {name: bytes(2 * shape[0]) for name, (_, shape) in qwen3().items() if "norm" in name}
    (line,) = check_values(
        model(tmp_path / "m", "bf16", norms, model_type="deepseek_v3"), with_draft=True
    )
    assert f" and the {len(norms) - 1} other norms hold only zeros" in line
    norms.popitem()
    assert (
        check_values(
            model(tmp_path / "n", "bf16", norms, model_type="deepseek_v3"), with_draft=True
        )
        == []
    )


# --- copies, config, tokenizer --------------------------------------------------------------------


def two_shards(folder: Path, second: bytes, shape: list[int]) -> Path:
    write_model(folder)
    write_safetensors(
        folder / "other.safetensors",
        {"model.norm.weight": ("BF16", shape)},
        {"model.norm.weight": second},
    )
    return folder


def test_a_tensor_in_two_files_is_refused_where_its_values_differ(tmp_path: Path) -> None:
    read_checkpoint(str(two_shards(tmp_path / "same", b"\x80\x3f" * 64, [64])))
    for name, data, shape in (
        ("value", b"\x80\x3f" * 63 + b"\x81\x3f", [64]),
        ("shape", b"\x80\x3f" * 64, [8, 8]),
    ):
        with pytest.raises(
            NibbleError, match=r"model\.norm\.weight is in .*model\.safetensors and in other"
        ) as caught:
            read_checkpoint(str(two_shards(tmp_path / name, data, shape)))
        assert caught.value.code is ExitCode.MODEL


@pytest.mark.parametrize(
    ("change", "word"),
    [({"dynamic": True}, "dynamically"), ({"symmetric": False}, "asymmetrically")],
)
def test_weights_that_vllm_has_no_scheme_for_are_refused_by_the_config(
    change: dict[str, Any], word: str, tmp_path: Path
) -> None:
    declared = json.loads(json.dumps(FORMS["ct"]))
    declared["config_groups"]["group_0"]["weights"] |= change
    write_checkpoint(
        tmp_path / "m", qwen3("ct"), {"num_hidden_layers": COUNT, "quantization_config": declared}
    )
    with pytest.raises(NibbleError, match=word) as caught:
        plan_for(read_wishes([str(tmp_path / "m"), "--target", "cpu"], {"HOME": "/home/me"}))
    assert caught.value.code is ExitCode.CONFIG


TOKENIZERS: dict[str, tuple[str, str, bool]] = {
    "none": ("", "", False),
    "tokenizer.json": ("tokenizer.json", "{}", True),
    "sentencepiece": ("tokenizer.model", "", True),
    "tekken": ("tekken.json", "{}", True),
    "words and merges": ("vocab.json", "{}", True),
    "a config alone": (
        "tokenizer_config.json",
        '{"tokenizer_class": "PreTrainedTokenizerFast"}',
        False,
    ),
    "a config that is a list": ("tokenizer_config.json", "[]", False),
    "remote code": (
        "tokenizer_config.json",
        '{"auto_map": {"AutoTokenizer": ["a.B", null]}}',
        True,
    ),
    "bytes": ("tokenizer_config.json", '{"tokenizer_class": "ByT5Tokenizer"}', True),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_folder_without_a_vocabulary_is_refused(kind: str, tmp_path: Path) -> None:
    name, text, is_enough = TOKENIZERS[kind]
    folder = write_model(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    if name:
        (folder / name).write_text(text)
    words = [str(folder), "--target", "cpu"]

    def check(more: list[str]) -> None:
        check_tokenizer(plan_for(read_wishes([*words, *more], {"HOME": "/home/me"})))

    if is_enough:
        check([])
    else:
        with pytest.raises(
            NibbleError, match=r"has no tokenizer; expected tokenizer\.json"
        ) as caught:
            check([])
        assert caught.value.code is ExitCode.MODEL
    check(["--skip-tokenizer-init"])
    check(["--tokenizer", str(ROOT / "models/nibble-demo")])


def test_plausibility_of_nothing_is_nothing(tmp_path: Path) -> None:
    found = check_plausible(tmp_path, {}, (), "qwen3")
    assert (found.problems, found.doubts) == ((), ())


@pytest.mark.parametrize("has_gate", [False, True])
def test_experts_without_a_gate_are_refused_on_the_cpu_alone(
    has_gate: bool, tmp_path: Path
) -> None:
    parts = ["up_proj", "down_proj", *(["gate_proj"] if has_gate else [])]
    weights: Tensors = {
        f"model.layers.1.mixer.experts.0.{part}.weight": ("BF16", [64, 64]) for part in parts
    }
    folder = str(write_checkpoint(tmp_path / "m", weights, OTHER_FAMILY))

    def check(target: str) -> None:
        check_experts_on_cpu(
            plan_for(read_wishes([folder, "--target", target], {"HOME": "/home/me"}))
        )

    check("hopper")
    if has_gate:
        return check("cpu")
    with pytest.raises(
        NibbleError, match=r"layers\.1\.mixer\.experts\.0\.up_proj of .* without gate_proj"
    ) as caught:
        check("cpu")
    assert caught.value.code is ExitCode.CONFIG
