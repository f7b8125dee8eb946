"""What a checkpoint seems to lack: by its names, in a plan, in `nibble inspect`, and when vLLM
ends the load for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nibble.checkpoint import read_checkpoint
from nibble.checkpoint.missing import missing_tensors, some_of
from nibble.cli.app import app
from nibble.engine.log import ErrorReader
from nibble.errors import ExitCode
from nibble.machine.paths import root
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from nibble.serve.failures import engine_died
from tests.support.models.cloverlm_models import CloverShape, write_packed
from tests.support.models.tiny_checkpoint import (
    OTHER_FAMILY,
    Tensors,
    linear,
    tensors,
    write_checkpoint,
)
from tests.support.models.tiny_model import MODELOPT_NVFP4, write_model
from tests.support.processor_time import within

ATTENTION = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
LINEAR_ATTENTION = [
    f"linear_attn.{name}" for name in ("in_proj.weight", "out_proj.weight", "A_log")
]
DENSE = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
MOE = [
    "mlp.gate.weight",
    *(f"mlp.experts.{number}.{end[4:]}" for number in range(4) for end in DENSE),
]
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
BESIDE = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
FLAG = "--model-loader-extra-config"


def layers(ends: dict[int, list[str]], prefix: str = "model.layers") -> list[str]:
    return [f"{prefix}.{number}.{end}" for number, some in ends.items() for end in some]


def alike(numbers: range, ends: list[str], prefix: str = "model.layers") -> list[str]:
    return layers(dict.fromkeys(numbers, ends), prefix)


def dense(count: int = 40) -> list[str]:
    return BESIDE + alike(range(count), [*ATTENTION, *DENSE, *NORMS])


def without(names: Iterable[str], *gone: str) -> list[str]:
    return [name for name in names if not name.startswith(gone)]


def moe(count: int = 40, first: int = 3) -> list[str]:
    ends = {
        number: [*ATTENTION, *NORMS, *(DENSE if number < first else MOE)] for number in range(count)
    }
    return BESIDE + layers(ends)


def hybrid(count: int = 48, every: int = 4) -> list[str]:
    kinds = {n: LINEAR_ATTENTION if (n + 1) % every else ATTENTION for n in range(count)}
    return BESIDE + layers({number: [*kind, *MOE, *NORMS] for number, kind in kinds.items()})


def mtp(count: int = 40) -> list[str]:
    draft = ["eh_proj.weight", "enorm.weight", "embed_tokens.weight", *ATTENTION, *NORMS]
    return moe(count) + layers({count: draft})


def vision(count: int = 28) -> list[str]:
    text = [name.replace("model.", "model.language_model.") for name in dense(count)]
    tower = alike(range(24), ["attn.qkv.weight", "norm1.weight"], "model.visual.blocks")
    return (
        text + tower + ["model.visual.patch_embed.proj.weight", "model.visual.merger.norm.weight"]
    )


WHOLE = {
    "dense": (dense(), 40),
    "four layers": (dense(4), 4),
    "one layer": (dense(1), 1),
    "tied head": (without(dense(), "lm_head"), 40),
    "first layers dense": (moe(), 40),
    "attention every 4th layer": (hybrid(), 48),
    "one attention layer among eight": (hybrid(8, 5), 8),
    "every other layer has experts": (
        BESIDE + layers({n: [*ATTENTION, *(MOE if n % 2 else DENSE)] for n in range(6)}),
        6,
    ),
    "draft after the last layer": (mtp(), 40),
    "draft by name": ([*moe(), "mtp.fc.weight", *layers({0: ATTENTION}, "mtp.layers")], 40),
    "vision tower": (vision(), 28),
    "first and last layers without an indexer": (
        moe() + alike(range(2, 39), ["self_attn.indexer.wk.weight"]),
        40,
    ),
    "last layers share keys": (
        without(dense(), *(f"model.layers.{n}.self_attn.k_proj" for n in (38, 39))),
        40,
    ),
    "one layer in another format": (
        [name if ".7." in name else name + "_packed" for name in dense()]
        + [name + "_scale" for name in dense() if ".7." not in name],
        40,
    ),
    "experts of one layer stored as one": (
        [*without(moe(), "model.layers.9.mlp.experts"), "model.layers.9.mlp.experts.gate_up_proj"],
        40,
    ),
    "encoder and decoder": (
        alike(range(6), ATTENTION, "encoder.block") + alike(range(4), ATTENTION, "decoder.block"),
        6,
    ),
    "separate draft": (["fc.weight", *layers({0: [*ATTENTION, *NORMS]}, "layers")], 1),
    "layers of another name": (["stem.0.weight"], 12),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_nothing_seems_to_be_missing_from_a_whole_checkpoint(kind: str) -> None:
    names, count = WHOLE[kind]
    assert missing_tensors(names, count) == ()
    assert missing_tensors(names, count, names) == ()


HOLES: dict[str, tuple[list[str], int, tuple[str, ...]]] = {
    "q of a layer": (dense(), 40, ("model.layers.7.self_attn.q_proj.weight",)),
    "norm of one of four layers": (dense(4), 4, ("model.layers.1.input_layernorm.weight",)),
    "norm of a hybrid": (hybrid(), 48, ("model.layers.11.input_layernorm.weight",)),
    "an expert": (moe(), 40, ("model.layers.9.mlp.experts.2.up_proj.weight",)),
    "norms of two layers": (
        dense(),
        40,
        ("model.layers.7.input_layernorm.weight", "model.layers.30.input_layernorm.weight"),
    ),
    "a layer": (mtp(), 40, ("model.layers.12",)),
    "the last layer, though there is a draft": (mtp(), 40, ("model.layers.39",)),
    "a layer beside a vision tower": (vision(), 28, ("model.language_model.layers.5",)),
}


@pytest.mark.parametrize("kind", HOLES)
def test_what_a_single_layer_lacks_is_named(kind: str) -> None:
    names, count, gone = HOLES[kind]
    ends = tuple(name if name.endswith("weight") else f"{name}." for name in gone)
    assert missing_tensors(without(names, *ends), count) == gone


def test_embedding_and_last_norm_are_missed() -> None:
    for names, prefix in (
        (dense(), "model."),
        (mtp(), "model."),
        (vision(), "model.language_model."),
    ):
        count = 28 if names == vision() else 40
        assert missing_tensors(without(names, f"{prefix}embed"), count) == ("the embedding",)
        assert missing_tensors(without(names, f"{prefix}norm"), count) == ("the last norm",)


def test_names_of_a_stale_index_are_missing_and_other_forms_of_them_are_not() -> None:
    gone = ("model.layers.1.self_attn.q_proj.weight", "vision.patch.weight")
    assert missing_tensors(without(dense(), gone[0]), 40, [*dense(), gone[1]]) == gone
    packed = [name + "_packed" if ".mlp." in name else name for name in dense()]
    assert (
        missing_tensors(packed, 40, [*dense(), "model.layers.0.self_attn.rotary_emb.inv_freq"])
        == ()
    )
    assert missing_tensors(["a"], None, ["a", "b"]) == ("b",)


def test_odd_names_and_numbers_are_taken_and_many_are_quick() -> None:
    odd = [
        "",
        ".",
        "layers.",
        "layers.1.",
        "h.²3.x",
        f"layers.{'9' * 5000}.x",
        "layers.1.\n\x00",
        "layers.٣.é",
    ]
    for count in (None, -1, 0, 2, 10**12):
        missing_tensors(odd, count, odd[:3])
    ends = [
        f"mlp.experts.{n}.{p}.{leaf}"
        for n in range(256)
        for p in "abc"
        for leaf in ("weight", "weight_scale")
    ]
    names = BESIDE + alike(range(66), [*ends, *NORMS])
    gone = [name for place, name in enumerate(names) if place % 997 or name in BESIDE]
    assert len(names) > 100_000 and within(3, lambda: missing_tensors(gone, 66, names))


def test_a_long_list_is_shown_by_its_first_names() -> None:
    assert some_of(["a", "b"]) == "a, b"
    assert some_of(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def test_the_models_of_this_repository_are_whole(tmp_path: Path) -> None:
    for folder in (root() / "models").glob("nibble-demo*/"):
        assert read_checkpoint(str(folder)).missing == (), folder
    assert read_checkpoint(str(write_model(tmp_path / "qwen"))).missing == ()
    assert (
        read_checkpoint(str(write_packed(tmp_path / "clover", CloverShape(blocks=4)))).missing == ()
    )
    for form in ("nvfp4", "ct", "bf16", "gptq"):
        assert (
            read_checkpoint(str(write_checkpoint(tmp_path / form, tensors(form)))).missing == ()
        ), form


def four_layers() -> Tensors:
    """NVFP4, without the norm of the layer numbered 1."""
    found: Tensors = {
        name: tensor for name, tensor in tensors("nvfp4").items() if "layers" not in name
    }
    for number in range(4):
        found |= {
            name.replace("layers.0", f"layers.{number}"): t for name, t in tensors("nvfp4").items()
        }
    del found["model.layers.1.input_layernorm.weight"]
    return found


@pytest.fixture
def holed(tmp_path: Path) -> str:
    config = {"quantization_config": MODELOPT_NVFP4, "num_hidden_layers": 4} | OTHER_FAMILY
    return str(write_checkpoint(tmp_path / "holed", four_layers(), config))


def plan(*words: str) -> Plan:
    return plan_for(
        read_wishes([*words, "--target", "cpu"], {"HOME": "/home/me", "HF_HUB_OFFLINE": "1"})
    )


def lacks(found: Plan) -> list[str]:
    return [notice for notice in found.notices if "seems to lack" in notice]


def test_where_something_seems_to_be_missing_vllm_is_told_to_look(holed: str) -> None:
    found = plan(holed)
    assert found.args[FLAG].value == {"enable_weights_track": True}
    assert "model.layers.1.input_layernorm.weight" in found.args[FLAG].reason
    (notice,) = lacks(found)
    assert "model.layers.1.input_layernorm.weight; vLLM ends the load" in notice
    assert FLAG in found.argv()


def test_a_whole_model_is_loaded_as_ever() -> None:
    found = plan("nibble-demo-nvfp4")
    assert FLAG not in found.args and not lacks(found)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ((FLAG, '{"num_threads": 2}'), {"enable_weights_track": True, "num_threads": 2}),
        ((FLAG, '{"enable_weights_track": false}'), {"enable_weights_track": False}),
        (("--load-format", "dummy"), None),
    ],
)
def test_a_users_own_loading_stays(holed: str, words: tuple[str, ...], value: Any) -> None:
    found = plan(holed, *words)
    assert (found.args[FLAG].value if FLAG in found.args else None) == value
    if value == {"enable_weights_track": False}:
        assert (found.args[FLAG].value, found.args[FLAG].source) == (value, "command line")
    (notice,) = lacks(found)
    told = (
        "vLLM ends the load"
        if value and value["enable_weights_track"]
        else "vLLM does not check it"
    )
    assert told in notice


def test_inspect_names_what_is_missing_and_does_not_say_exactly(holed: str) -> None:
    runner = CliRunner(env={"MODEL": None, "HF_MODEL": None})
    shown = runner.invoke(app, ["inspect", holed])
    assert shown.exit_code == 0
    assert "missing 1, probably: model.layers.1.input_layernorm.weight\n" in shown.stdout
    assert "seems to be incomplete" in shown.stdout and "loads" not in shown.stdout
    data = json.loads(runner.invoke(app, ["inspect", holed, "--json"]).stdout)
    assert data["missing"] == ["model.layers.1.input_layernorm.weight"]


def test_an_index_that_names_a_tensor_of_no_file_is_noticed(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "m", tensors("nvfp4"), {"quantization_config": MODELOPT_NVFP4}
    )
    names = dict.fromkeys(
        [*tensors("nvfp4"), *linear("model.extra", 16, 16, "bf16")], "model.safetensors"
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert read_checkpoint(str(folder)).missing == ("model.extra.weight",)


def test_layers_that_differ_as_their_config_says_lack_nothing(tmp_path: Path) -> None:
    config = {"quantization_config": MODELOPT_NVFP4, "num_hidden_layers": 4, "block_configs": []}
    assert (
        read_checkpoint(str(write_checkpoint(tmp_path / "nas", four_layers(), config))).missing
        == ()
    )


def test_a_load_that_vllm_ended_for_weights_is_told_as_a_model_that_is_not_whole() -> None:
    reader = ErrorReader()
    names = ", ".join(f"'model.layers.{number}.input_layernorm.weight'" for number in range(9))
    for line in (
        (
            "(EngineCore pid=7) ERROR 11-22 18:58:01 [core.py:1100] ValueError: Following weights"
            f" were not initialized from checkpoint: {{{names}}}"
        ),
        "(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above.",
    ):
        reader.feed(line)
    cut = engine_died("weights", "exit code 1", reader.cause, "EngineCore", None)
    assert cut.code == ExitCode.MODEL and "model.layers.0.input_layernorm.weight, " in cut.what
    assert cut.what.endswith("and more")
    cause = "ValueError: Following weights were not initialized from checkpoint: {'b', 'a'}"
    error = engine_died("weights", "exit code 1", cause, "", None)
    assert error.what == "vLLM ended the load: no tensor of the checkpoint fills a, b"
    assert '"enable_weights_track": false' in error.action
    more = engine_died(
        "weights", "exit code 1", cause.replace("'a'", "'a', 'c', 'd', 'e'"), "", None
    )
    assert more.what.endswith("fills a, b, c and 2 more")
    assert engine_died("weights", "exit code 1", cause[:-4], "", None).what.endswith(
        "fills b and more"
    )


def test_a_tensor_that_did_not_fit_is_told_as_a_model_that_is_damaged() -> None:
    cause = (
        "nibble.engine.plugin.whole_load.TensorError: model.layers.1.mlp.up_proj.weight"
        " (bfloat16 of shape [127, 64]) does not fit the model (AssertionError: Tried to load"
        " weights of size …)"
    )
    reader = ErrorReader()
    reader.feed(f"(EngineCore pid=7) ERROR 11-22 18:58:01 [core.py:1100] {cause}")
    error = engine_died("load", "exit code 1", reader.cause, "VLLM::Worker (pid 7)", None)
    assert (
        error.code == ExitCode.MODEL
        and "up_proj.weight, bfloat16 of shape [127, 64], does not fit" in error.what
    )


def test_a_fused_layer_without_the_scales_of_a_part_is_told_so_too() -> None:
    cause = (
        "nibble_kernels.merge.ScaleError: model.layers.1.self_attn.qkv_proj.weight_scale was not"
        " loaded, or is NaN; expected a value for each of the layer's tensors; `nibble inspect`"
        " shows what the checkpoint has"
    )
    error = engine_died("load", "exit code 1", cause, "VLLM::Worker (pid 7)", None)
    assert error.code == ExitCode.MODEL and error.action == "download the model again"
    assert error.what.endswith("fills model.layers.1.self_attn.qkv_proj.weight_scale")
