"""`nibble inspect`: inventory, fused scales, what vLLM alone gets wrong, verdict."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from test_nvfp4_validation import COMPRESSED, gaussian_scales, tiled, two_weights
from typer.testing import CliRunner

from nibble.checkpoint import read_source
from nibble.checkpoint.fused_groups import FusedGroup, unrepresentable
from nibble.checkpoint.source import open_source
from nibble.cli.app import app
from nibble.cli.inspection import Inspection, inspect, inspect_model
from nibble.plan.gather import read_wishes
from tests.support.models.cloverlm_models import CloverShape, write_packed
from tests.support.models.tiny_checkpoint import (
    LINEAR_SHAPES,
    OTHER_FAMILY,
    Tensors,
    linear,
    tensors,
    write_checkpoint,
)
from tests.support.models.tiny_model import MODELOPT_NVFP4
from tests.support.servers.hub import Hub

LAYER = "model.layers.0."
Q, K, V = (f"{LAYER}self_attn.{name}_proj" for name in "qkv")
NO_MODEL = {"MODEL": None, "HF_MODEL": None}  # a developer's own would be a second model
GATE, UP = f"{LAYER}mlp.gate_proj", f"{LAYER}mlp.up_proj"


def f32(value: float) -> bytes:
    return struct.pack("<f", value)


def look(
    folder: Path,
    weights: Tensors,
    declared: Any = MODELOPT_NVFP4,
    values: dict[str, bytes] | None = None,
) -> Inspection:
    config = {"quantization_config": declared} if declared else {}
    write_checkpoint(folder, weights, config, None, values)
    return inspect_model(read_wishes([str(folder)], {}), False)


def group(found: Inspection, start: str) -> FusedGroup:
    return next(group for group in found.groups if group.name.startswith(start))


def with_scales(folder: Path, scales: dict[str, bytes]) -> Inspection:
    return look(folder, tensors("nvfp4"), values=scales)


def test_a_sound_checkpoint_loads_exactly_and_vllm_alone_lacks_only_the_cpu(tmp_path: Path) -> None:
    found = look(tmp_path / "m", tensors("nvfp4"))
    assert found.verdict.startswith("loads exactly (by its headers and all its scales")
    assert (found.exit_code, found.vllm_alone) == (0, ("has no NVFP4 kernel for the CPU",))
    assert [group.quality for group in found.groups] == ["equal", "equal"]
    assert found.producer == "modelopt 0.40.0" and found.excluded == ("lm_head",)
    assert (found.lm_head, found.draft, found.kv_scales) == ("BF16, 0.0 MiB", "none", 0)


def test_a_fused_layer_in_two_formats_does_not_load(tmp_path: Path) -> None:
    weights = {name: t for name, t in tensors("nvfp4").items() if not name.startswith(f"{Q}.")}
    found = look(tmp_path / "m", weights | linear(Q, *LINEAR_SHAPES["self_attn.q_proj"], "bf16"))
    assert found.exit_code == 5 and found.verdict.startswith(f"refused: {Q}.weight in ")
    assert "(1 more like it)" not in found.verdict


def test_the_inventory_counts_every_tensor_once(tmp_path: Path) -> None:
    found = look(tmp_path / "m", tensors("nvfp4"))
    assert sum(row["tensors"] for row in found.inventory) == len(tensors("nvfp4"))
    assert found.checkpoint.weights is not None
    assert sum(row["bytes"] for row in found.inventory) == found.checkpoint.weights.total_bytes
    assert {(row["kind"], row["dtype"]) for row in found.inventory} >= {
        ("mlp", "U8"),
        ("scales", "F8_E4M3"),
        ("scales", "F32"),
    }


def test_unequal_scales_of_modelopt_are_a_gain_of_the_largest(tmp_path: Path) -> None:
    found = with_scales(
        tmp_path / "m",
        {
            f"{Q}.weight_scale_2": f32(1.0),
            f"{K}.weight_scale_2": f32(3.3),
            f"{V}.weight_scale_2": f32(1.1),
        },
    )
    attention = group(found, f"{LAYER}self_attn")
    assert attention.name == f"{LAYER}self_attn.q_proj+k_proj+v_proj"
    assert (attention.quality, attention.worst_part) == ("column scale", Q)
    assert attention.gain_error == pytest.approx(2.3, rel=1e-6)
    assert any("1 of 2 fused layers" in line and "230.0%" in line for line in found.vllm_alone)
    assert found.exit_code == 0


def test_unequal_divisors_of_compressed_tensors_are_a_gain_of_the_smallest_multiplier(
    tmp_path: Path,
) -> None:
    divisors = {f"{GATE}.weight_global_scale": f32(1.0), f"{UP}.weight_global_scale": f32(4.0)}
    found = look(tmp_path / "m", tensors("ct_w4a4"), COMPRESSED, divisors)
    pair = group(found, f"{LAYER}mlp")
    assert (pair.scales, pair.worst_part, pair.gain_error) == ((1.0, 0.25), GATE, 0.75)


def test_a_ratio_folds_where_every_block_scale_stays_an_e4m3_value(tmp_path: Path) -> None:
    half = {f"{GATE}.weight_scale_2": f32(0.5)}
    assert group(with_scales(tmp_path / "a", half), f"{LAYER}mlp").quality == "foldable"
    # 0x01 is the smallest value; half of it is none. With gate's scale for both, up's 448 doubles:
    # no value either.
    lost = half | {
        f"{GATE}.weight_scale": b"\x01" + b"\x38" * 511,
        f"{UP}.weight_scale": b"\x7e" + b"\x38" * 511,
    }
    assert group(with_scales(tmp_path / "b", lost), f"{LAYER}mlp").quality == "column scale"
    kept = lost | {f"{UP}.weight_scale": b"\x38" * 512}
    assert group(with_scales(tmp_path / "c", kept), f"{LAYER}mlp").quality == "foldable"


def test_representable_products_are_those_of_exact_arithmetic() -> None:
    assert unrepresentable(Fraction(1)) == frozenset()
    assert unrepresentable(Fraction(1, 2)) == {0x01, 0x03, 0x05, 0x07, 0x09, 0x0B, 0x0D, 0x0F}
    assert unrepresentable(Fraction(2)) == frozenset(range(0x77, 0x7F))  # above 224
    assert unrepresentable(Fraction(1 / 3)) is None  # a float: no short fraction


def experts(count: int) -> Tensors:
    weights = tensors("nvfp4")
    for number in range(count):
        for name in ("gate_proj", "up_proj", "down_proj"):
            weights |= linear(f"{LAYER}mlp.experts.{number}.{name}", 64, 64, "nvfp4")
    return weights


def test_an_experts_up_is_wrong_by_its_gates_scale(tmp_path: Path) -> None:
    scales = {f"{LAYER}mlp.experts.1.up_proj.weight_scale_2": f32(2.0)}
    found = look(tmp_path / "m", experts(3), values=scales)
    counted = [(group.quality, group.gain_error) for group in found.groups if group.is_expert]
    assert counted == [("equal", 0.0), ("expert factor", 0.5), ("equal", 0.0)]
    assert any("1 of 3 experts" in line and "50.0%" in line for line in found.vllm_alone)


def test_marlins_loss_of_small_scales_is_told(tmp_path: Path) -> None:
    small = {f"{UP}.weight_scale": b"\x7e" + b"\x07" + b"\x38" * 510}
    assert any("1 weights" in line for line in with_scales(tmp_path / "m", small).vllm_alone)
    raised = {
        f"{UP}.weight_scale": b"\x38" + b"\x07" + b"\x38" * 510
    }  # Marlin multiplies by 256 first
    assert not any("Marlin" in line for line in with_scales(tmp_path / "raised", raised).vllm_alone)


def test_damage_is_the_verdict_and_the_exit_code(tmp_path: Path) -> None:
    found = with_scales(tmp_path / "m", {f"{UP}.weight_scale": b"\x38" * 511 + b"\x7f"})
    assert found.exit_code == 4 and found.verdict.startswith("refused: ")
    assert f"{UP}.weight_scale" in found.refusal and "NaN" in found.refusal


def test_labels_lists_and_legacy_files_vllm_gets_wrong_are_told(tmp_path: Path) -> None:
    weights = tensors("w4a16")
    found = look(tmp_path / "m", weights, MODELOPT_NVFP4 | {"ignore": []})
    assert any("uninitialised memory" in line for line in found.vllm_alone)
    assert any("builds lm_head as the config lists it" in line for line in found.vllm_alone)
    assert (found.wrong_modules, found.corrected) == (("lm_head",), ("lm_head",))
    assert found.exit_code == 0


def test_quartet2_is_read_in_its_own_layout(tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "m", CloverShape(blocks=1))
    found = inspect_model(read_wishes([str(folder)], {}), False)
    assert found.exit_code == 0
    assert len(found.checkpoint.nvfp4) == 6 and found.producer.startswith("cloverlm_converter")


def test_scales_that_speak_against_their_label_withhold_the_word_exactly(tmp_path: Path) -> None:
    scales = gaussian_scales(random.Random(3), 0.2)
    two_weights(tmp_path / "m", (tiled(scales), scales))
    found = inspect_model(read_wishes([str(tmp_path / "m")], {}), False)
    assert found.layout is not None and (found.layout.right, found.layout.wrong) == (1, 1)
    assert found.exit_code == 0 and found.verdict.startswith("loads; 1 of its weights may have")


def test_what_is_not_nvfp4_is_told_so(tmp_path: Path) -> None:
    found = look(tmp_path / "m", tensors("bf16"), None)
    assert (found.verdict, found.vllm_alone, found.exit_code) == ("loads; no layer is NVFP4", (), 0)


def test_of_cloverlm_in_bf16_it_is_told_that_loading_quantizes_it(tmp_path: Path) -> None:
    config = {"model_type": "cloverlm", "architectures": ["CloverLMForCausalLM"]}
    folder = write_checkpoint(tmp_path / "m", tensors("bf16"), config)
    found = inspect_model(read_wishes([str(folder)], {}), False)
    assert found.verdict == "loads; no layer is NVFP4: its layers are quantized when it loads"


def test_quantized_heads_drafts_and_kv_scales_are_told(tmp_path: Path) -> None:
    weights = {
        name: tensor for name, tensor in tensors("nvfp4").items() if not name.startswith("lm_head")
    }
    weights |= linear("lm_head", 128, 64, "nvfp4") | linear("mtp.fc", 64, 128, "bf16")
    weights |= linear("mtp.layers.0.mlp.up_proj", 64, 64, "nvfp4")
    weights |= {f"{K}.k_scale": ("F32", []), f"{V}.v_scale": ("F32", [])}
    found = look(tmp_path / "m", weights, MODELOPT_NVFP4 | {"ignore": []})
    assert found.lm_head == "NVFP4, 0.0 MiB" and found.kv_scales == 2
    assert found.draft.endswith("1 linear layers quantized, 1 not")


def test_without_a_folder_only_headers_and_fp32_scales_are_read(
    tmp_path: Path, monkeypatch
) -> None:
    folder = write_checkpoint(
        tmp_path / "m", tensors("nvfp4"), {"quantization_config": MODELOPT_NVFP4}
    )
    source = open_source(str(folder), None, {})
    read: list[tuple[int, int]] = []
    whole = type(source).read
    monkeypatch.setattr(
        type(source),
        "read",
        lambda self, file, a, b: (read.append((a, b)), whole(self, file, a, b))[1],
    )
    remote = replace(read_source(source), path=None)
    read.clear()
    found = inspect(source, remote)
    assert (
        found.scales_read.startswith("by its headers and fp32 scales")
        and found.groups[0].quality == "equal"
    )
    scale_2 = [remote.tensors[f"{LAYER}{name}.weight_scale_2"] for name in LINEAR_SHAPES]
    assert all(any(a <= t.offset and t.offset + 4 <= b for a, b in read) for t in scale_2)


def test_on_the_hub_no_weight_and_no_block_scale_is_downloaded(tmp_path: Path) -> None:
    # Large enough that its tensors are not within the first read of the header.
    weights = linear(GATE, 1024, 1024, "nvfp4") | linear(UP, 1024, 1024, "nvfp4")
    folder = write_checkpoint(
        tmp_path / "m",
        weights,
        {"quantization_config": MODELOPT_NVFP4} | OTHER_FAMILY,
        None,
        {f"{UP}.weight_scale_2": f32(0.3)},
    )
    with Hub() as hub:
        hub.add("acme/nvfp4", folder)
        environ = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
        }
        found = inspect_model(read_wishes(["acme/nvfp4"], environ), True)
        asked = [
            path
            for method, path in hub.requests
            if method == "GET" and path.endswith("model.safetensors")
        ]
    assert found.checkpoint.path is None and not (tmp_path / "hf").exists()
    assert (found.exit_code, found.layout) == (0, None)
    assert (
        found.groups[0].gain_error == pytest.approx(1 / 0.3 - 1)
        and found.groups[0].quality == "column scale"
    )
    # The header, and the fp32 scales that lie on either side of the codes
    assert 2 <= len(asked) <= 3


def test_the_command_prints_a_screen_and_the_same_as_json(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "m",
        tensors("nvfp4"),
        {"quantization_config": MODELOPT_NVFP4},
        None,
        {f"{Q}.weight_scale_2": f32(0.3)},
    )
    runner = CliRunner(env=NO_MODEL)
    shown = runner.invoke(app, ["inspect", str(folder)])
    assert shown.exit_code == 0 and len(shown.stdout.splitlines()) <= 30
    for text in ("NVFP4", "column scale", "vLLM alone", "loads exactly", "lm_head; agrees"):
        assert text in shown.stdout
    data = json.loads(runner.invoke(app, ["inspect", str(folder), "--json"]).stdout)
    assert data["verdict"].startswith("loads exactly") and data["exit_code"] == 0
    assert {entry["quality"] for entry in data["fused_groups"]} == {"equal", "column scale"}
    assert sum(row["tensors"] for row in data["inventory"]) == len(tensors("nvfp4"))


def test_a_refused_checkpoint_ends_the_command_with_its_code(tmp_path: Path) -> None:
    weights = tensors("nvfp4")
    del weights[f"{UP}.weight_scale_2"]
    folder = write_checkpoint(tmp_path / "m", weights, {"quantization_config": MODELOPT_NVFP4})
    shown = CliRunner(env=NO_MODEL).invoke(app, ["inspect", str(folder)])
    assert shown.exit_code == 4 and f"{UP}.weight_scale_2" in shown.stdout.replace("\n", "")
