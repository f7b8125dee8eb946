"""`nibble convert` of CloverLM: there and back, BF16 to packed, and what no server reads is said
to be so.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from nibble_kernels.scale_layout import untile
from safetensors.torch import load_file, save_file

from nibble.checkpoint import read_checkpoint
from nibble.checkpoint.convert import Wishes, convert
from nibble.checkpoint.convert.wishes import TARGETS
from nibble.cli.inspection import inspect_model
from nibble.errors import ExitCode, NibbleError
from nibble.plan.gather import plan_for, read_wishes
from tests.support.models.cloverlm_models import CloverShape, is_product, write_bf16, write_packed
from tests.support.models.tokenmonster_file import write_vocabulary
from tests.support.refusals import refusal_of

SHAPE = CloverShape(blocks=1)
L1 = "transformer.blocks.0.mlp.l1.0.weight"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packed(tmp_path_factory.mktemp("clover") / "packed", SHAPE)


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bf16(tmp_path_factory.mktemp("clover") / "bf16", SHAPE)


def stored(folder: Path) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {
        name: (tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in load_file(folder / "model.safetensors").items()
    }


def verdict(folder: Path) -> tuple[int, str]:
    found = inspect_model(read_wishes([str(folder)], {}), False)
    return found.exit_code, found.verdict


def refused(code: ExitCode, *words: Any) -> str:
    return refusal_of(lambda: convert(*words), code).line()


def test_packed_weights_become_modelopts_and_packed_again_bit_for_bit(
    packed: Path, tmp_path: Path
) -> None:
    there = convert(str(packed), tmp_path / "modelopt", "modelopt").dest
    found = read_checkpoint(str(there))
    assert (found.scheme.name, found.problems, len(found.nvfp4)) == ("W4A16_NVFP4", (), 6)
    rows, columns = SHAPE.sizes()[L1]
    tiled = load_file(packed / "model.safetensors")[f"{L1}_scale"].view(torch.uint8)
    linear = load_file(there / "model.safetensors")[f"{L1}_scale"].view(torch.uint8)
    assert torch.equal(linear, untile(tiled, rows, columns // 16)) and not torch.equal(
        linear, tiled
    )

    back = convert(str(there), tmp_path / "back", "quartet-packed").dest
    assert stored(back) == stored(packed)
    assert json.loads((back / "config.json").read_text()) == json.loads(
        (packed / "config.json").read_text()
    )
    assert verdict(back)[0] == 0 and "exactly" in verdict(back)[1]


def test_by_way_of_compressed_tensors_codes_and_block_scales_stay_and_g_is_within_an_ulp(
    packed: Path, tmp_path: Path
) -> None:
    there = convert(str(packed), tmp_path / "ct", "compressed-tensors").dest
    back = convert(str(there), tmp_path / "back", "quartet-packed").dest
    before, after = stored(packed), stored(back)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if name.endswith("_scale_2"):
            own, new = (int.from_bytes(found[2], "little") for found in (tensor, after[name]))
            assert abs(own - new) <= 1
        else:
            assert tensor == after[name]
    assert verdict(back)[0] == 0


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_layout_that_no_server_reads_is_refused_with_the_way_back(
    layout: str, packed: Path, tmp_path: Path
) -> None:
    there = convert(str(packed), tmp_path / "there", layout).dest
    code, line = verdict(there)
    assert code == ExitCode.CONFIG and "--to quartet-packed" in line
    vocabulary = write_vocabulary(tmp_path / "any.vocab")
    with pytest.raises(NibbleError) as caught:
        plan_for(
            read_wishes([str(there), "--tokenizer", str(vocabulary)], {"NIBBLE_TARGET": "cpu"})
        )
    assert caught.value.code is ExitCode.CONFIG and "--to quartet-packed" in caught.value.line()


def test_the_authors_own_config_is_read_in_tiles_wherever_it_stands(
    packed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(packed, folder)
    declared = json.loads((folder / "hf_quant_config.json").read_text())
    (folder / "hf_quant_config.json").unlink()
    config = SHAPE.config(quantization_config=declared)
    (folder / "config.json").write_text(json.dumps(config))
    assert verdict(folder)[0] == 0 and read_checkpoint(str(folder)).scheme.name == "quartet2-packed"


def test_bf16_is_packed_as_a_server_would_quantize_it(
    bf16: Path, packed: Path, tmp_path: Path
) -> None:
    made = convert(str(bf16), tmp_path / "made", "nvfp4")
    assert made.weights == sum(map(is_product, SHAPE.sizes())) == 6
    assert stored(made.dest) == stored(packed)
    assert read_checkpoint(str(made.dest)).scheme.name == "quartet2-packed"
    assert verdict(made.dest)[0] == 0 and "exactly" in verdict(made.dest)[1]


def test_each_refusal_names_a_target_that_works(bf16: Path, packed: Path, tmp_path: Path) -> None:
    for layout in TARGETS[:-1]:
        assert "--to nvfp4" in refused(ExitCode.CONFIG, str(bf16), tmp_path / "x", layout)
    assert "--to quartet-packed" in refused(ExitCode.CONFIG, str(packed), tmp_path / "x", "nvfp4")
    assert convert(str(packed), tmp_path / "x", "quartet-packed").weights == 6


def test_options_that_a_server_would_not_keep_are_refused(bf16: Path, tmp_path: Path) -> None:
    for wishes in (Wishes(exclude=("*.l2",)), Wishes("fp4", texts=("a text",))):
        assert "CloverLM" in refused(ExitCode.USAGE, str(bf16), tmp_path / "x", "nvfp4", wishes)


def test_a_weight_that_does_not_fill_tiles_is_named(tmp_path: Path) -> None:
    folder = write_bf16(tmp_path / "m", CloverShape(blocks=1, key_heads=1))
    line = refused(ExitCode.CONFIG, str(folder), tmp_path / "x", "nvfp4")
    assert "lk.weight is [64, 512]" in line and not (tmp_path / "x").exists()


def test_damage_is_found_before_anything_is_written(packed: Path, tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "m", SHAPE)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{L1}_scale"].view(torch.uint8)[0, 0] = 0x7E
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert f"{L1}_scale" in refused(ExitCode.MODEL, str(folder), tmp_path / "x", "modelopt")
