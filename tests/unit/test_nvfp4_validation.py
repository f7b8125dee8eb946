"""NVFP4 checkpoints are loaded exactly or refused with the tensor's name: headers, values,
layout of scales.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest

from nibble.checkpoint import Checkpoint, read_checkpoint
from nibble.checkpoint.scale_layout import check_layout, effect, untile
from nibble.checkpoint.scale_values import check_values, e4m3_value, first_damaged
from nibble.checkpoint.verify import check_scales
from nibble.errors import ExitCode, NibbleError
from nibble.plan.validate import check_checkpoint
from tests.support.models.tiny_checkpoint import (
    LINEAR_SHAPES,
    OTHER_FAMILY,
    Tensors,
    linear,
    stacked,
    tensors,
    write_checkpoint,
)
from tests.support.models.tiny_model import MODELOPT_NVFP4

LAYER = "model.layers.0."
UP = f"{LAYER}mlp.up_proj"
GROUP = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": GROUP, "input_activations": GROUP}
    },
}
COMPRESSED_A16 = COMPRESSED | {
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP}}
}
W4A16 = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["lm_head"]}
QUARTET2 = {
    "producer": {"name": "cloverlm_converter", "version": "1.0"},
    "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": []},
}
NVFP4_FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "modelopt": ("nvfp4", MODELOPT_NVFP4),
    "modelopt w4a16": ("w4a16", W4A16),
    "compressed-tensors": ("ct_w4a4", COMPRESSED),
    "compressed-tensors w4a16": ("ct", COMPRESSED_A16),
}


def checkpoint(
    folder: Path, weights: Tensors, declared: Any = MODELOPT_NVFP4, **more: Any
) -> Checkpoint:
    values = more.pop("values", None)
    config = {"quantization_config": declared} | more
    return read_checkpoint(str(write_checkpoint(folder, weights, config, None, values)))


def refusal(found: Checkpoint, with_draft: bool = False) -> NibbleError | None:
    """What `serve` would end with, by headers and by values."""
    args = (
        {"--speculative-config": {"method": "mtp", "num_speculative_tokens": 1}}
        if with_draft
        else {}
    )
    try:
        check_checkpoint(found, args)
        check_scales(found, with_draft)
    except NibbleError as error:
        return error
    return None


@pytest.mark.parametrize("form", NVFP4_FORMS)
def test_a_sound_checkpoint_of_every_form_passes(form: str, tmp_path: Path) -> None:
    stored, declared = NVFP4_FORMS[form]
    found = checkpoint(tmp_path / "m", tensors(stored), declared)
    assert refusal(found) is None
    assert [(w.rows, w.columns) for w in found.nvfp4 if w.module == UP] == [(128, 64)]
    assert len(found.nvfp4) == 7 and all(w.scale and w.global_scale for w in found.nvfp4)


def test_quartet2_is_read_with_its_own_layout_and_refused_only_for_its_model(
    tmp_path: Path,
) -> None:
    folder = write_checkpoint(
        tmp_path / "m", tensors("quartet2"), {"model_type": "cloverlm"}, QUARTET2
    )
    found = read_checkpoint(str(folder))
    assert {weight.layout for weight in found.nvfp4} == {"quartet2"} and found.problems == ()
    assert found.nvfp4[0].columns == 64  # F4 counts elements
    other = read_checkpoint(
        str(write_checkpoint(tmp_path / "other", tensors("quartet2"), {}, QUARTET2))
    )
    error = refusal(other)
    assert error is not None and error.code == ExitCode.CONFIG and "nibble convert" in error.line()


def test_stacked_experts_are_read_with_k_in_the_middle(tmp_path: Path) -> None:
    name = "model.layers.0.feed_forward.experts.gate_up_proj"
    found = checkpoint(tmp_path / "m", tensors("nvfp4") | stacked(name, 4, 96, 64))
    weight = next(weight for weight in found.nvfp4 if weight.module == name)
    assert (weight.experts, weight.rows, weight.columns) == (4, 96, 64) and refusal(found) is None
    wrong = (
        tensors("nvfp4")
        | stacked(name, 4, 96, 64)
        | {f"{name}_weight_scale": ("F8_E4M3", [4, 96, 4])}
    )
    error = refusal(checkpoint(tmp_path / "wrong", wrong))
    assert (
        error is not None
        and f"{name}_weight_scale" in error.line()
        and "[4, 4, 96]" in error.line()
    )


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_2", "input_scale"])
def test_a_missing_tensor_is_named_with_its_file(leaf: str, tmp_path: Path) -> None:
    weights = tensors("nvfp4")
    del weights[f"{UP}.{leaf}"]
    error = refusal(checkpoint(tmp_path / "m", weights))
    assert error is not None and error.code == ExitCode.MODEL
    assert error.what == f"{UP}.{leaf} in {tmp_path}/m/model.safetensors is missing"


@pytest.mark.parametrize("leaf", ["weight_global_scale", "input_global_scale"])
def test_a_missing_divisor_of_compressed_tensors_is_named(leaf: str, tmp_path: Path) -> None:
    weights = tensors("ct_w4a4")
    del weights[f"{UP}.{leaf}"]
    error = refusal(checkpoint(tmp_path / "m", weights, COMPRESSED))
    assert error is not None and error.code == ExitCode.MODEL and f"{UP}.{leaf}" in error.what


def test_many_tensors_of_one_problem_make_one_line(tmp_path: Path) -> None:
    weights = {
        name: tensor for name, tensor in tensors("nvfp4").items() if not name.endswith("_scale_2")
    }
    error = refusal(checkpoint(tmp_path / "m", weights))
    assert error is not None and "(6 more like it)" in error.line()


# --- layers that vLLM fuses -----------------------------------------------------------------------

FUSED = [
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.q_proj+k_proj+v_proj"),
    ("self_attn.v_proj", "self_attn.q_proj", "self_attn.q_proj+k_proj+v_proj"),
    ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_proj+up_proj"),
]


def with_plain(weights: Tensors, *modules: str, form: str = "bf16") -> Tensors:
    """The same with `modules` stored in another format."""
    kept = {
        name: t
        for name, t in weights.items()
        if not name.startswith(tuple(f"{m}." for m in modules))
    }
    for module in modules:
        rows, columns = LINEAR_SHAPES.get(module.removeprefix(LAYER), (64, 64))
        kept |= linear(module, rows, columns, form)
    return kept


@pytest.mark.parametrize("form", NVFP4_FORMS)
@pytest.mark.parametrize(("plain", "other", "layer"), FUSED)
def test_a_fused_layer_of_which_a_part_is_not_quantized_is_refused_by_name(
    plain: str, other: str, layer: str, form: str, tmp_path: Path
) -> None:
    stored, declared = NVFP4_FORMS[form]
    error = refusal(
        checkpoint(tmp_path / "m", with_plain(tensors(stored), LAYER + plain), declared)
    )
    assert error is not None and error.code == ExitCode.CONFIG
    name = "NVFP4" if stored in ("nvfp4", "ct_w4a4") else "W4A16_NVFP4"
    assert (
        error.what
        == f"{LAYER}{plain}.weight in {tmp_path}/m/model.safetensors is BF16, and {LAYER}{other} is"
        f" {name}"
    )
    assert error.expected == f"one format for all of {LAYER}{layer}, which vLLM builds as one layer"


def test_a_fused_layer_that_is_not_quantized_at_all_is_fine(tmp_path: Path) -> None:
    weights = with_plain(tensors("nvfp4"), *(f"{LAYER}self_attn.{name}_proj" for name in "qkv"))
    assert refusal(checkpoint(tmp_path / "m", weights)) is None


def test_parts_of_a_fused_layer_with_different_algorithms_are_refused(tmp_path: Path) -> None:
    layers = {LAYER + name: {"quant_algo": "NVFP4"} for name in LINEAR_SHAPES}
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    labelled = mixed | {"quantized_layers": layers | {UP: {"quant_algo": "W4A16_NVFP4"}}}
    error = refusal(checkpoint(tmp_path / "a16", tensors("nvfp4"), labelled))
    assert (
        error is not None and f"{UP}.weight" in error.what and "is W4A16_NVFP4, and" in error.what
    )
    fp8 = mixed | {"quantized_layers": layers | {UP: {"quant_algo": "FP8"}}}
    error = refusal(checkpoint(tmp_path / "fp8", with_plain(tensors("nvfp4"), UP, form="fp8"), fp8))
    assert error is not None and "is F8_E4M3, and" in error.what


def test_experts_whose_second_weight_is_not_quantized_are_refused(tmp_path: Path) -> None:
    experts = f"{LAYER}mlp.experts"
    weights = tensors("nvfp4")
    for number in range(2):
        for name in ("gate_proj", "up_proj", "down_proj"):
            weights |= linear(
                f"{experts}.{number}.{name}", 64, 64, "bf16" if name == "down_proj" else "nvfp4"
            )
    error = refusal(checkpoint(tmp_path / "m", weights))
    assert error is not None and error.code == ExitCode.CONFIG
    assert f"{experts}.0.down_proj.weight" in error.what and "(1 more like it)" in error.what
    all_in_one = tensors("nvfp4") | stacked(f"{experts}.gate_up_proj", 2, 128, 64)
    all_in_one |= {f"{experts}.down_proj": ("BF16", [2, 64, 64])}
    error = refusal(checkpoint(tmp_path / "stacked", all_in_one))
    assert error is not None and f"{experts}.down_proj in" in error.what


def test_a_mixed_layer_of_the_draft_matters_only_where_it_is_served(tmp_path: Path) -> None:
    weights = tensors("nvfp4")
    for name, form in (("gate_proj", "nvfp4"), ("up_proj", "bf16")):
        weights |= linear(f"mtp.layers.0.mlp.{name}", 128, 64, form)
    found = checkpoint(tmp_path / "m", weights)
    assert refusal(found) is None
    error = refusal(found, with_draft=True)
    assert error is not None and "mtp.layers.0.mlp.up_proj.weight" in error.what


@pytest.mark.parametrize(("model_type", "is_fused"), [("deepseek_v3", True), ("minicpm3", False)])
def test_latent_projections_are_one_layer_where_the_model_fuses_them(
    model_type: str, is_fused: bool, tmp_path: Path
) -> None:
    latent = linear(f"{LAYER}self_attn.q_a_proj", 64, 64, "nvfp4")
    latent |= linear(f"{LAYER}self_attn.kv_a_proj_with_mqa", 64, 64, "bf16")
    found = checkpoint(tmp_path / "m", tensors("nvfp4") | latent, model_type=model_type)
    assert bool(found.problems) is is_fused


BAD_HEADERS: dict[str, tuple[str, tuple[str, list[int]], ExitCode, str]] = {
    "group of 32": (
        "weight_scale",
        ("F8_E4M3", [128, 2]),
        ExitCode.CONFIG,
        "one scale for 32 weights",
    ),
    "padded tiles": ("weight_scale", ("F8_E4M3", [128, 8]), ExitCode.CONFIG, "128x4 tiled layout"),
    "other shape": ("weight_scale", ("F8_E4M3", [64, 4]), ExitCode.MODEL, "has shape [64, 4]"),
    "scales of mxfp4": ("weight_scale", ("U8", [128, 4]), ExitCode.CONFIG, "is U8"),
    "global scale in bf16": ("weight_scale_2", ("BF16", []), ExitCode.MODEL, "is BF16"),
    "two global scales": ("weight_scale_2", ("F32", [2]), ExitCode.MODEL, "of shape [2]"),
    "two activation scales": ("input_scale", ("F32", [2]), ExitCode.MODEL, "of shape [2]"),
    "codes in F4": ("weight", ("F4", [128, 64]), ExitCode.CONFIG, "is F4"),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_wrong_type_or_shape_is_refused_by_its_header(name: str, tmp_path: Path) -> None:
    leaf, stored, code, message = BAD_HEADERS[name]
    weights = tensors("nvfp4") | {f"{UP}.{leaf}": stored}
    if name == "padded tiles":  # 96 input features have 6 groups, padded to 8
        weights |= linear(UP, 128, 96, "nvfp4") | {f"{UP}.{leaf}": stored}
    error = refusal(checkpoint(tmp_path / "m", weights))
    assert error is not None and error.code == code
    assert f"{UP}.{leaf}" in error.what and message in error.what


def test_an_expert_missing_from_a_layer_is_named(tmp_path: Path) -> None:
    weights = tensors("nvfp4")
    for expert in (0, 1, 3):
        for name in ("gate_proj", "up_proj", "down_proj"):
            weights |= linear(f"model.layers.0.mlp.experts.{expert}.{name}", 64, 64, "nvfp4")
    error = refusal(checkpoint(tmp_path / "m", weights))
    assert error is not None and error.code == ExitCode.MODEL
    assert "model.layers.0.mlp.experts.2." in error.what and "3 of 4 experts" in error.what


def test_a_declared_group_size_other_than_16_is_refused(tmp_path: Path) -> None:
    error = refusal(
        checkpoint(tmp_path / "m", tensors("nvfp4"), MODELOPT_NVFP4 | {"group_size": 32})
    )
    assert error is not None and error.code == ExitCode.CONFIG and "groups of 32" in error.line()


def test_what_is_wrong_with_the_draft_counts_only_where_it_drafts(tmp_path: Path) -> None:
    weights = tensors("nvfp4") | linear("mtp.layers.0.mlp.up_proj", 64, 64, "nvfp4")
    del weights["mtp.layers.0.mlp.up_proj.input_scale"]
    found = checkpoint(tmp_path / "m", weights)
    assert refusal(found) is None
    error = refusal(found, with_draft=True)
    assert error is not None and "mtp.layers.0.mlp.up_proj.input_scale" in error.what
    damaged = {"mtp.layers.0.mlp.up_proj.weight_scale": b"\x38" * 255 + b"\xff"}
    weights |= linear("mtp.layers.0.mlp.up_proj", 64, 64, "nvfp4")
    found = checkpoint(tmp_path / "damaged", weights, values=damaged)
    assert refusal(found) is None and refusal(found, with_draft=True) is not None


# --- values ---------------------------------------------------------------------------------------


def test_every_e4m3_byte_is_told_finite_or_damaged() -> None:
    for byte in range(256):
        expected = None if byte < 0x7F else (5, byte)
        assert first_damaged(b"\x38" * 5 + bytes([byte]) + b"\x38") == expected
    assert [e4m3_value(byte) for byte in (0x01, 0x07, 0x08, 0x38, 0x7E)] == [
        2**-9,
        7 * 2**-9,
        2**-6,
        1.0,
        448.0,
    ]


@pytest.mark.parametrize(
    ("byte", "word"), [(0x7F, "NaN"), (0xFF, "NaN"), (0x80, "negative"), (0xB8, "negative")]
)
@pytest.mark.parametrize("place", [0, 200, 511])
def test_a_flipped_byte_in_a_scale_tensor_is_named_with_its_place(
    byte: int, word: str, place: int, tmp_path: Path
) -> None:
    scales = bytearray(b"\x38" * 512)
    scales[place] = byte
    found = checkpoint(
        tmp_path / "m", tensors("nvfp4"), values={f"{UP}.weight_scale": bytes(scales)}
    )
    error = refusal(found)
    assert error is not None and error.code == ExitCode.MODEL
    assert f"{UP}.weight_scale in {tmp_path}/m/model.safetensors has a {word} scale" in error.line()
    assert f"byte 0x{byte:02x} at element {place}" in error.line()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("leaf", ["weight_scale_2", "input_scale"])
def test_an_fp32_scale_that_is_not_finite_and_positive_is_named(
    value: float, leaf: str, tmp_path: Path
) -> None:
    values = {f"{UP}.{leaf}": struct.pack("<f", value)}
    error = refusal(checkpoint(tmp_path / "m", tensors("nvfp4"), values=values))
    assert error is not None and error.code == ExitCode.MODEL and f"{UP}.{leaf}" in error.what


def test_only_scales_are_read(tmp_path: Path) -> None:
    weights = tensors("nvfp4")
    found = checkpoint(tmp_path / "m", weights)
    values = check_values(tmp_path / "m", found.nvfp4)
    scale_bytes = sum(
        rows * columns // 16 for rows, columns in [(64, 64)] * 2 + [(32, 64)] * 2 + [(128, 64)] * 3
    )
    assert (values.tensors, values.nbytes, values.problems) == (21, scale_bytes + 14 * 4, ())


def test_a_file_cut_after_its_header_was_read_is_an_error_with_its_name(tmp_path: Path) -> None:
    found = checkpoint(tmp_path / "m", tensors("nvfp4"))
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40_000])
    with pytest.raises(NibbleError, match=r"model\.safetensors ends within") as caught:
        check_values(tmp_path / "m", found.nvfp4)
    assert caught.value.code == ExitCode.MODEL


# --- layout ---------------------------------------------------------------------------------------

ROWS, COLUMNS = 256, 512
BLOCKS = COLUMNS // 16


def tiled(scales: bytes) -> bytes:
    """The 128x4 layout of block scales, written from its formula."""
    stored = bytearray(len(scales))
    for row in range(ROWS):
        for block in range(BLOCKS):
            place = (
                ((row // 128) * (BLOCKS // 4) + block // 4) * 512
                + row % 32 * 16
                + row // 32 % 4 * 4
                + block % 4
            )
            stored[place] = scales[row * BLOCKS + block]
    return bytes(stored)


def gaussian_scales(random_: random.Random, spread: float) -> bytes:
    """E4M3 bytes of log-normal scales whose rows differ by `spread` octaves (standard
    deviation).
    """
    found = bytearray()
    for _ in range(ROWS):
        mean = random_.gauss(0, spread)
        found += bytes(
            max(8, min(0x78, round(8 * (7 + mean + random_.gauss(0, 0.35))))) for _ in range(BLOCKS)
        )
    return bytes(found)


def two_weights(
    folder: Path, scales: tuple[bytes, bytes], declared: Any = MODELOPT_NVFP4, **values: bytes
) -> Checkpoint:
    names = ("model.layers.0.mlp.gate_proj", UP)
    weights = tensors("nvfp4")
    for name in names:
        weights |= linear(name, ROWS, COLUMNS, "nvfp4")
    given = {f"{name}.weight_scale": stored for name, stored in zip(names, scales, strict=True)}
    given |= {f"{name}.weight": values["codes"] for name in names if "codes" in values}
    return checkpoint(folder, weights, declared, values=given, **OTHER_FAMILY)


def test_untile_is_the_inverse_of_the_tiled_layout() -> None:
    source = random.Random(1)
    scales = bytes(source.randrange(127) for _ in range(ROWS * BLOCKS))
    assert untile(tiled(scales), BLOCKS) == scales != tiled(scales)


def test_tiled_scales_in_a_modelopt_file_are_refused_and_linear_ones_are_not(
    tmp_path: Path,
) -> None:
    source = random.Random(2)
    pair = (gaussian_scales(source, 0.2), gaussian_scales(source, 0.2))
    assert refusal(two_weights(tmp_path / "linear", pair)) is None
    error = refusal(two_weights(tmp_path / "tiled", (tiled(pair[0]), tiled(pair[1]))))
    assert error is not None and error.code == ExitCode.CONFIG
    assert ".weight_scale in " in error.what and "holds its scales in 128x4 tiles" in error.what


def test_one_tensor_alone_or_a_tie_is_no_evidence(tmp_path: Path) -> None:
    source = random.Random(3)
    structured, flat = gaussian_scales(source, 0.2), gaussian_scales(source, 0.0)
    assert refusal(two_weights(tmp_path / "one", (tiled(structured), flat))) is None
    assert refusal(two_weights(tmp_path / "split", (tiled(structured), structured))) is None
    assert refusal(two_weights(tmp_path / "flat", (tiled(flat), tiled(flat)))) is None


def test_structure_along_columns_alone_does_not_make_a_sound_file_wrong(tmp_path: Path) -> None:
    # Heads of different size give every row the same pattern: the rows' variance is then larger in
    # the wrong layout.
    pattern = bytes(40 + 16 * (block // 8 % 2) for block in range(BLOCKS)) * ROWS
    rows_alone = [
        sum(layout[r * BLOCKS : (r + 1) * BLOCKS])
        for layout in (pattern, untile(pattern, BLOCKS))
        for r in range(ROWS)
    ]
    assert len(set(rows_alone[:ROWS])) == 1 < len(set(rows_alone[ROWS:]))
    assert effect(pattern, BLOCKS) > 0.9 * effect(untile(pattern, BLOCKS), BLOCKS)
    assert refusal(two_weights(tmp_path / "m", (pattern, pattern))) is None


def four_over_six(source: random.Random) -> tuple[bytes, bytes]:
    """(scales, codes) of which blocks scaled to 4 have no code of 6 and may have scales above
    256; no other structure.
    """
    scales, codes = bytearray(), bytearray()
    for _ in range(ROWS * BLOCKS):
        is_four = source.random() < 0.45
        scales.append(source.randrange(0x60, 0x7D if is_four else 0x79))
        codes += bytes([0x61 if is_four else 0x71]) + bytes(7)
    return bytes(scales), bytes(codes)


def test_four_over_six_tensors_tell_their_layout_without_any_structure(tmp_path: Path) -> None:
    scales, codes = four_over_six(random.Random(4))
    found = two_weights(tmp_path / "linear", (scales, scales), codes=codes)
    assert (check_layout(tmp_path / "linear", found.nvfp4).right, refusal(found)) == (2, None)
    error = refusal(two_weights(tmp_path / "tiled", (tiled(scales), tiled(scales)), codes=codes))
    assert error is not None and "128x4 tiles" in error.what


def test_linear_scales_in_a_quartet2_file_are_found_too(tmp_path: Path) -> None:
    source = random.Random(5)
    pair = (gaussian_scales(source, 0.2), gaussian_scales(source, 0.2))
    for name, stored, expected in (("right", tuple(map(tiled, pair)), 0), ("wrong", pair, 2)):
        found = two_weights(tmp_path / name, stored)  # type: ignore[arg-type]
        quartet2 = [weight._replace(layout="quartet2") for weight in found.nvfp4]
        check = check_layout(tmp_path / name, quartet2)
        assert (check.wrong, check.problem is not None) == (expected, expected > 0)
