"""Packed CloverLM by the largest code times scale of each tensor: one that is wrong is found
before anything is loaded.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from nibble_kernels.scale_layout import untile
from safetensors.torch import load_file, save_file
from torch import Tensor

from nibble.checkpoint import read_checkpoint
from nibble.checkpoint.verify import check_scales
from nibble.cli.inspection import Inspection, inspect_model
from nibble.errors import ExitCode, NibbleError
from nibble.plan.gather import read_wishes
from tests.support.models.cloverlm_models import CloverShape, write_packed

L2 = "transformer.blocks.1.mlp.l2.weight"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packed(tmp_path_factory.mktemp("clover") / "packed", CloverShape())


def changed(packed: Path, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    shutil.copytree(packed, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def inspected(folder: Path) -> Inspection:
    return inspect_model(read_wishes([str(folder)], {}), False)


def served(folder: Path) -> NibbleError | None:
    try:
        check_scales(read_checkpoint(str(folder)), with_draft=False)
    except NibbleError as error:
        return error
    return None


def row_by_row(tensors: dict[str, Tensor]) -> None:
    rows, blocks = tensors[f"{L2}_scale"].shape
    tensors[f"{L2}_scale"] = untile(tensors[f"{L2}_scale"], rows, blocks)


def one_block_too_large(tensors: dict[str, Tensor]) -> None:
    """A 6 where the scale is above 256, in one block of 65536."""
    rows, blocks = tensors[f"{L2}_scale"].shape
    linear = untile(tensors[f"{L2}_scale"], rows, blocks).view(torch.uint8)
    row, block = (linear > 0x78).nonzero()[-1].tolist()
    tensors[L2].view(torch.uint8)[row, block * 8 + 7] = 0x70


def half_of_the_codes(tensors: dict[str, Tensor]) -> None:
    """As a download with a hole leaves them: only the largest block is missing here."""
    codes = tensors[L2].view(torch.uint8)
    rows, blocks = tensors[f"{L2}_scale"].shape
    linear = untile(tensors[f"{L2}_scale"], rows, blocks).view(torch.uint8)
    codes.unflatten(1, (blocks, 8))[linear >= 0x78] = 0


def test_every_weight_of_a_sound_file_is_decided(packed: Path) -> None:
    found = inspected(packed)
    assert found.layout is not None and (found.layout.tensors, found.layout.right) == (12, 12)
    assert found.exit_code == 0 and found.verdict.startswith("loads exactly")
    assert served(packed) is None


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (row_by_row, ExitCode.CONFIG, "holds its scales row by row"),
        (one_block_too_large, ExitCode.MODEL, "as its largest code times scale"),
        (half_of_the_codes, ExitCode.MODEL, "has less than 1536"),
    ],
)
def test_one_wrong_tensor_is_refused_by_name_before_it_is_loaded(
    change: Callable[[dict[str, Tensor]], None],
    code: ExitCode,
    words: str,
    packed: Path,
    tmp_path: Path,
) -> None:
    folder = changed(packed, tmp_path / "m", change)
    error = served(folder)
    assert error is not None and error.code is code
    assert f"{L2}_scale in {folder}/model.safetensors" in error.line() and words in error.line()
    assert "\n" not in error.line() and "more like it" not in error.line()
    found = inspected(folder)
    assert found.exit_code == code and found.verdict == f"refused: {error.line()}"
    assert found.layout is not None and (found.layout.right, found.layout.wrong) == (11, 1)


@pytest.mark.vllm
def test_what_is_found_is_what_the_plugin_would_refuse_when_it_loads(
    packed: Path, tmp_path: Path
) -> None:
    from nibble.engine.plugin.quartet2 import operands

    everything, cpu = slice(None), torch.device("cpu")

    def load(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        leaves = {
            leaf: tensors[f"{L2[:-7]}.{leaf}"]
            for leaf in ("weight", "weight_scale", "weight_scale_2")
        }
        operands(L2, leaves, everything, everything, cpu)

    load(packed)
    for number, change in enumerate((row_by_row, one_block_too_large, half_of_the_codes)):
        folder = changed(packed, tmp_path / str(number), change)
        with pytest.raises(ValueError, match="largest code times scale"):
            load(folder)
        assert served(folder) is not None


def test_zeros_alone_are_no_damage(packed: Path, tmp_path: Path) -> None:
    def zero(tensors: dict[str, Tensor]) -> None:
        for leaf in ("", "_scale"):
            tensors[f"{L2}{leaf}"].view(torch.uint8).zero_()
        tensors[f"{L2}_scale_2"].fill_(1)

    assert served(changed(packed, tmp_path / "m", zero)) is None


def test_scales_that_fill_no_tiles_are_refused(tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "m", CloverShape(blocks=1, key_heads=1))
    error = served(folder)
    assert error is not None and error.code is ExitCode.CONFIG
    assert "mhsa.lk.weight" in error.line() and "is [64, 512] (1 more like it)" in error.line()
