"""A norm that holds NaN is found before a load; what may hold infinities, and what is large, is
left alone.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nibble.checkpoint import read_checkpoint
from nibble.checkpoint.plain_values import check_plain_values, first_not_finite
from nibble.checkpoint.verify import check_scales
from nibble.errors import ExitCode, NibbleError
from tests.support.paths import ROOT

DEMO = ROOT / "models" / "nibble-demo-nvfp4"
NORM = "model.layers.2.post_attention_layernorm.weight"


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float32, "F32")]
)
def test_every_value_that_is_no_finite_number_is_found_and_no_other(
    dtype: torch.dtype, name: str
) -> None:
    if name == "F32":
        bits = torch.arange(1 << 16, dtype=torch.int32) << 16 | 1
        values = bits.view(torch.float32)
    else:
        values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    for value in values:
        data = bytes(value.reshape(1).view(torch.uint8).tolist())
        assert (first_not_finite(data, name) == 0) == (not value.isfinite()), value
    finite = values[values.isfinite()]
    assert first_not_finite(bytes(finite.view(torch.uint8).tolist()), name) is None
    wrong = torch.cat([finite[:100], torch.tensor([float("nan")], dtype=dtype)])
    assert first_not_finite(bytes(wrong.view(torch.uint8).tolist()), name) == 100


def damaged(folder: Path, tensor: str, value: float, place: int = 7) -> Path:
    """The demo with one value of one tensor changed."""
    shutil.copytree(DEMO, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor].view(-1)[place] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_norm_with_it_is_refused_by_name(value: float, tmp_path: Path) -> None:
    found = read_checkpoint(str(damaged(tmp_path / "m", NORM, value)))
    with pytest.raises(
        NibbleError, match=f"{NORM} in .* holds NaN or infinity at element 7"
    ) as caught:
        check_scales(found, with_draft=True)
    assert caught.value.code == ExitCode.MODEL


def test_inspect_names_it(tmp_path: Path) -> None:
    model = damaged(tmp_path / "m", NORM, float("nan"))
    done = subprocess.run(
        [sys.executable, "-m", "nibble", "inspect", str(model), "--json"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == ExitCode.MODEL
    assert [one["tensor"] for one in json.loads(done.stdout)["problems"]] == [NORM]


def test_the_demos_and_masks_have_nothing_wrong(tmp_path: Path) -> None:
    for name in ("nibble-demo-nvfp4", "nibble-demo-moe-nvfp4"):
        found = read_checkpoint(str(ROOT / "models" / name))
        assert found.path is not None
        assert check_plain_values(found.path, found.tensors.values(), found.num_layers) == ()
    save_file(
        {"layers.0.attn.mask": torch.full((4, 4), float("-inf"))}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text('{"architectures": ["X"], "model_type": "x"}')
    found = read_checkpoint(str(tmp_path))
    assert check_plain_values(tmp_path, found.tensors.values(), None) == ()
