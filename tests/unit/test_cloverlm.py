"""CloverLM in a plan: its flags, its vocabulary file, and what nibble refuses before vLLM
starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nibble.errors import ExitCode, NibbleError
from nibble.machine.paths import root
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.models.cloverlm import check_vocabulary
from nibble.plan.plan import Plan
from tests.support.models.cloverlm_models import HF_QUANT_CONFIG, CloverShape
from tests.support.models.tiny_model import write_model, write_safetensors
from tests.support.models.tokenmonster_file import write_vocabulary
from tests.support.refusals import refusal_of

SHAPE = CloverShape(blocks=1)
NAME = "englishcode-32000-strict-nocapcode-v1-eot=14199.vocab"


def write_headers(folder: Path, packed: bool = False, **config: Any) -> Path:
    """A model folder of zeros."""

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE.config(**config)))
    tensors: dict[str, tuple[str, list[int]]] = {}
    for name, tensor in SHAPE.tensors().items():
        shape = list(tensor.shape)
        if packed and ".blocks." in name and len(shape) == 2:
            scales = {
                f"{name}_scale": ("F8_E4M3", [shape[0], shape[1] // 16]),
                f"{name}_scale_2": ("F32", []),
            }
            tensors |= {name: ("F4", shape), **scales}
        else:
            tensors[name] = ("BF16", shape)
    write_safetensors(folder / "model.safetensors", tensors)
    if packed:
        (folder / "hf_quant_config.json").write_text(json.dumps(HF_QUANT_CONFIG))
    return folder


def plan(folder: Path, *words: str, **environ: str) -> Plan:
    return plan_for(read_wishes([str(folder), *words], {"NIBBLE_TARGET": "cpu", **environ}))


def refused(folder: Path, *words: str, **environ: str) -> NibbleError:
    return refusal_of(lambda: plan(folder, *words, **environ))


@pytest.mark.parametrize("packed", [False, True])
def test_both_forms_get_their_quantization_and_tokenizer(packed: bool, tmp_path: Path) -> None:
    folder = write_headers(tmp_path / "m", packed)
    write_vocabulary(folder / NAME)
    found = plan(folder)
    assert {name: found.args[name].value for name in ("--quantization", "--tokenizer-mode")} == {
        "--quantization": "quartet2",
        "--tokenizer-mode": "tokenmonster",
    }
    # The plugin serves it with its hf_quant_config.json
    assert "--hf-overrides" not in found.args
    assert all(found.args[name].reason for name in ("--quantization", "--tokenizer-mode"))


def test_what_the_user_writes_stays(tmp_path: Path) -> None:
    folder = write_headers(tmp_path / "m")
    assert plan(folder, "--tokenizer-mode", "hf").args["--tokenizer-mode"].value == "hf"


def test_without_its_vocabulary_the_file_is_named_with_where_it_is(tmp_path: Path) -> None:
    error = refused(write_headers(tmp_path / "m"))
    assert error.code == ExitCode.MODEL and NAME in error.line() and "--tokenizer" in error.line()
    elsewhere = write_vocabulary(tmp_path / "elsewhere.vocab")
    assert plan(tmp_path / "m", "--tokenizer", str(elsewhere)).args["--tokenizer"].value == str(
        elsewhere
    )


def test_two_vocabularies_are_one_too_many(tmp_path: Path) -> None:
    folder = write_headers(tmp_path / "m")
    for name in ("a.vocab", "b.vocab"):
        write_vocabulary(folder / name)
    assert "a.vocab, b.vocab" in refused(folder).line()


@pytest.mark.parametrize(
    "content", [b"", b"\x01\x01\x01" + bytes(40), b"not a vocabulary, but long enough for one"]
)
def test_a_file_that_is_no_vocabulary_of_this_size_is_refused(
    content: bytes, tmp_path: Path
) -> None:
    folder = write_headers(tmp_path / "m")
    (folder / NAME).write_bytes(content)
    found = plan(folder)
    with pytest.raises(NibbleError) as caught:
        check_vocabulary(found.checkpoint, found.args)
    assert caught.value.code == ExitCode.MODEL and "512 ids" in caught.value.line()


OF_ITS_SIZE = "made-here-eot=511.vocab"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A model's folder with a vocabulary of its 512 ids."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"%03d" % number for number in range(255)]
    folder = write_headers(tmp_path / "m")
    write_vocabulary(folder / OF_ITS_SIZE, tokens)
    return folder


def test_the_vocabulary_of_the_models_size_passes(whole: Path) -> None:
    found = plan(whole)
    check_vocabulary(found.checkpoint, found.args)


@pytest.mark.parametrize(
    ("kept", "said"), [(60, "ends too early"), (-1, "ends too early"), (None, "goes on")]
)
def test_a_vocabulary_that_is_not_whole_is_refused_before_anything_is_loaded(
    kept: int | None, said: str, whole: Path
) -> None:
    content = (whole / OF_ITS_SIZE).read_bytes()
    (whole / OF_ITS_SIZE).write_bytes(content[:kept] if kept else content + b"more")
    found = plan(whole)
    with pytest.raises(NibbleError) as caught:
        check_vocabulary(found.checkpoint, found.args)
    assert (
        caught.value.code == ExitCode.MODEL
        and said in caught.value.line()
        and OF_ITS_SIZE in caught.value.line()
    )


def test_one_in_which_another_id_ends_a_document_is_refused_before_anything_is_loaded(
    whole: Path,
) -> None:
    (whole / OF_ITS_SIZE).rename(whole / NAME)
    found = plan(whole)
    with pytest.raises(NibbleError) as caught:
        check_vocabulary(found.checkpoint, found.args)
    assert caught.value.code == ExitCode.MODEL and "it is another one" in caught.value.line()


def test_reading_a_vocabulary_takes_no_torch(whole: Path) -> None:
    """Whose import takes seconds, and memory for as long as nibble watches the server."""
    sources = [str(root() / "kernels/src"), *sys.path]
    code = (
        "import sys; from pathlib import Path; from nibble.engine.plugin.tokenmonster import load;"
        f" load(Path({str(whole / OF_ITS_SIZE)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sources)},
        check=True,
    )


def test_the_mode_of_activation_scales_reaches_the_plugin_and_is_for_cloverlm_alone(
    tmp_path: Path,
) -> None:
    folder = write_headers(tmp_path / "m")
    write_vocabulary(folder / NAME)
    config = {"nibble": {"act_scale_mode": "batch", "nvfp4_activations": "bf16"}}
    found = plan(folder, "--act-scale-mode", "batch", NIBBLE_NVFP4_ACTIVATIONS="bf16")
    assert found.args["--additional-config"].value == config

    error = refused(write_model(tmp_path / "other"), NIBBLE_ACT_SCALE_MODE="batch")
    assert error.code == ExitCode.CONFIG and "CloverLM" in error.line()


def test_more_context_than_it_was_trained_for_is_refused(tmp_path: Path) -> None:
    folder = write_headers(tmp_path / "m")
    write_vocabulary(folder / NAME)
    error = refused(folder, "--max-model-len", "2048")
    assert error.code == ExitCode.CONFIG and "1024" in error.line()


def test_another_reader_for_its_weights_is_refused(tmp_path: Path) -> None:
    folder = write_headers(tmp_path / "m", packed=True)
    write_vocabulary(folder / NAME)
    error = refused(folder, "--quantization", "modelopt_fp4")
    assert error.code == ExitCode.CONFIG and "128x4" in error.line()


def test_another_architecture_under_its_type_is_refused(tmp_path: Path) -> None:
    error = refused(write_headers(tmp_path / "m", architectures=["LlamaForCausalLM"]))
    assert error.code == ExitCode.MODEL and "CloverLMForCausalLM" in error.line()
