"""`nibble convert --kv-cache fp8` and `--keep-sensitive`: what is measured, written and refused."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nibble_kernels.weight_quant import dequantize, quantize
from safetensors.torch import load_file

from nibble.checkpoint import read_checkpoint
from nibble.checkpoint.convert import Wishes, convert
from nibble.checkpoint.convert.calibrate import Loaded, largest, load
from nibble.checkpoint.convert.measured import cache_layers, cache_scales
from nibble.checkpoint.convert.quantize import Part, group
from nibble.checkpoint.convert.sensitivity import divergences, most_sensitive
from nibble.checkpoint.convert.wishes import read_wishes
from nibble.checkpoint.headers import TensorInfo
from nibble.errors import ExitCode, NibbleError
from tests.support.paths import ROOT

DEMO = ROOT / "models" / "nibble-demo"
TEXTS = tuple((ROOT / "models" / "demo_other_prompts.txt").read_text().splitlines()[:10])


@pytest.fixture(scope="module")
def model() -> Loaded:
    return load(DEMO)


@pytest.fixture(scope="module")
def rows(model: Loaded) -> list[list[int]]:
    """Of the demo's context."""
    ids = model.tokenizer("\n".join(TEXTS)).input_ids
    return [ids[at : at + 48] for at in range(0, len(ids) - 47, 48)][:3]


# --- scales of an FP8 cache -----------------------------------------------------------------------


def test_scales_are_powers_of_two_with_which_the_largest_key_and_value_fit(
    model: Loaded, rows: list[list[int]], tmp_path: Path
) -> None:
    wishes = Wishes(fp8_cache=True, texts=TEXTS)
    done = convert(str(DEMO), tmp_path / "out", "nvfp4", wishes)
    found = load_file(done.dest / "model.safetensors")
    texts = [model.tokenizer(text).input_ids for text in TEXTS]
    most = largest(model, texts).caches
    for layer, (key, value) in enumerate(most):
        attention = f"model.layers.{layer}.self_attn"
        for name, magnitude in (("k_proj.k_scale", key), ("v_proj.v_scale", value)):
            scale = float(found[f"{attention}.{name}"])
            assert math.frexp(scale)[0] == 0.5  # a power of two
            assert scale / 2 < magnitude / 448 <= scale
    assert sum(name.endswith(("k_scale", "v_scale")) for name in found) == 2 * len(most)
    checkpoint = read_checkpoint(str(done.dest))
    assert checkpoint.scheme.kv_cache == "fp8_e4m3" and not checkpoint.problems
    config = json.loads((done.dest / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}


def test_a_cache_keeps_what_was_measured_of_any_row(model: Loaded, rows: list[list[int]]) -> None:
    whole = largest(model, rows).caches
    each = [largest(model, [row]).caches for row in rows]
    assert whole == [
        tuple(max(one[layer][part] for one in each) for part in (0, 1))
        for layer in range(len(whole))
    ]


def infos(*names: str) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, "BF16", (32, 32), 2048) for name in names}


@pytest.mark.parametrize(
    "names",
    [
        ("model.layers.0.self_attn.qkv_proj.weight",),
        ("model.layers.0.self_attn.k_proj.weight",),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight",),
    ],
)
def test_a_model_without_key_and_value_weights_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(NibbleError, match="k_proj and v_proj") as caught:
        cache_layers(infos(*names))
    assert caught.value.code == ExitCode.CONFIG


def test_layers_without_a_cache_of_their_own_are_refused() -> None:
    one = [f"model.layers.0.self_attn.{leaf}.weight" for leaf in ("k_proj", "v_proj")]
    with pytest.raises(NibbleError, match="1 attention layers"):
        cache_scales(infos(*one), [(1.0, 1.0), (2.0, 2.0)])
    found = cache_scales(infos(*one), [(448.0, 0.0)])
    assert found[one[0]] == ("model.layers.0.self_attn.k_proj.k_scale", 1.0)
    assert found[one[1]][1] > 0  # a server takes only scales above 0


# --- layers that stay in BF16 ---------------------------------------------------------------------


@torch.inference_mode()
def measured_divergence(model: Loaded, changed: Any, rows: list[list[int]]) -> float:
    ids = torch.tensor(rows)
    wanted, found = (each(ids).logits.float().log_softmax(-1) for each in (model.network, changed))
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


def linear_layers(network: Any) -> Iterator[tuple[str, Any]]:
    for name, part in network.named_modules():
        if isinstance(part, torch.nn.Linear) and ".layers." in name:
            yield name, part


def rounded(weight: torch.Tensor) -> torch.Tensor:
    return dequantize(quantize(weight))


def test_the_estimate_orders_layers_as_their_divergence_does(
    model: Loaded, rows: list[list[int]]
) -> None:
    names = [name for name, _ in linear_layers(model.network)][::2]
    estimated = divergences(model, names, rows, rounded)
    assert estimated.keys() == set(names)
    measured = {}
    for name in names:
        changed = copy.deepcopy(model.network)
        weight = changed.get_submodule(name).weight
        weight.data = rounded(weight.data).to(weight.dtype)
        measured[name] = measured_divergence(model, changed, rows)
    table = torch.tensor([[estimated[name], measured[name]] for name in names])
    assert float(torch.corrcoef(table.log().T)[0, 1]) > 0.7, table
    most = sorted(names, key=measured.__getitem__)[-3:]
    assert set(most) & set(sorted(names, key=estimated.__getitem__)[-3:])


def test_layers_that_are_fused_stay_together_and_the_budget_is_kept() -> None:
    parts = [
        Part(f"model.layers.{layer}.{leaf}", 64, 64)
        for layer in (0, 1)
        for leaf in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
    ]
    found = {part.module: 0.001 for part in parts} | {
        "model.layers.1.self_attn.k_proj": 1.0,
        "model.layers.0.mlp.down_proj": 0.1,
    }
    a_layer = 64 * 64 * (2 - 0.5625)
    assert most_sensitive(found, parts, 2, 0) == []
    assert most_sensitive(found, parts, 2, a_layer) == ["model.layers.0.mlp.down_proj"]
    kept = most_sensitive(found, parts, 2, 3 * a_layer)
    assert {group(name) for name in kept} == {"model.layers.1.self_attn.q_proj"} and len(kept) == 3
    assert len(most_sensitive(found, parts, 2, 8 * a_layer)) == len(parts)


def test_the_checkpoint_grows_by_at_most_the_percentage(tmp_path: Path) -> None:
    plain = convert(str(DEMO), tmp_path / "plain", "nvfp4")
    wishes = Wishes(keep_percent=30, texts=TEXTS * 80)
    done = convert(str(DEMO), tmp_path / "kept", "nvfp4", wishes)
    assert done.kept and done.weights == plain.weights - len(done.kept)
    assert plain.nbytes < done.nbytes <= 1.3 * plain.nbytes + 4096  # headers
    checkpoint = read_checkpoint(str(done.dest))
    assert not checkpoint.problems
    tensors = load_file(done.dest / "model.safetensors")
    source = load_file(DEMO / "model.safetensors")
    for module in done.kept:
        assert torch.equal(tensors[f"{module}.weight"], source[f"{module}.weight"])


def test_a_percentage_that_keeps_every_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NibbleError, match="every layer") as caught:
        convert(str(DEMO), tmp_path / "x", "nvfp4", Wishes(keep_percent=300, texts=TEXTS * 80))
    assert caught.value.code == ExitCode.USAGE and list(tmp_path.iterdir()) == []


# --- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"kv_cache": "int8"}, "--kv-cache int8"),
        ({"keep_percent": -1.0}, "--keep-sensitive -1.0"),
        ({"keep_percent": float("nan")}, "--keep-sensitive nan"),
    ],
)
def test_values_that_are_none(words: dict[str, Any], says: str) -> None:
    with pytest.raises(NibbleError, match=says) as caught:
        read_wishes(None, None, False, (), **words)
    assert caught.value.code == ExitCode.USAGE


@pytest.mark.parametrize("wishes", [Wishes(fp8_cache=True), Wishes(keep_percent=5)])
def test_a_change_of_layout_measures_nothing(wishes: Wishes, tmp_path: Path) -> None:
    demo = ROOT / "models" / "nibble-demo-nvfp4"
    with pytest.raises(NibbleError, match="--kv-cache and --keep-sensitive") as caught:
        convert(str(demo), tmp_path / "x", "compressed-tensors", wishes)
    assert caught.value.code == ExitCode.USAGE
