"""`nibble convert --method gptq`: what it needs, what it refuses, and what it takes over.

llm-compressor lives in another environment; a program of the same interface stands in its place.
`benchmarks/real_model_quality.py` runs the real one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from nibble.checkpoint import read_checkpoint
from nibble.checkpoint.convert import Wishes, convert, gptq
from nibble.checkpoint.convert.wishes import read_wishes
from nibble.errors import ExitCode, NibbleError
from tests.support.paths import ROOT

DEMO = ROOT / "models" / "nibble-demo"
GPTQ = Wishes(method="gptq")
STAND_IN = """#!{python}
import json, shutil, sys
if "-c" in sys.argv:
    print({version!r})
else:
    job = json.load(open(sys.argv[-1]))
    json.dump(job, open({job!r}, "w"))
    {action}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NIBBLE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def install(cache: Path, action: str, version: str = gptq.VERSION) -> Path:
    """The stand-in; the file that gets its job."""
    python = cache / "llm-compressor" / "bin" / "python"
    python.parent.mkdir(parents=True)
    job = cache / "job.json"
    python.write_text(
        STAND_IN.format(python=sys.executable, version=version, job=str(job), action=action)
    )
    python.chmod(0o755)
    return job


def refused(code: ExitCode, dest: Path, wishes: Wishes = GPTQ) -> str:
    with pytest.raises(NibbleError) as caught:
        convert(str(DEMO), dest, "nvfp4", wishes)
    assert caught.value.code == code
    assert not dest.exists() and list(dest.parent.glob(f".{dest.name}*")) == []
    return caught.value.line()


def test_codes_and_scales_of_llm_compressor_are_taken_over_bit_for_bit(
    cache: Path, tmp_path: Path
) -> None:
    rounded = convert(str(DEMO), tmp_path / "rounded", "nvfp4", Wishes(four_over_six=True)).dest
    result = convert(str(rounded), tmp_path / "ct", "compressed-tensors").dest
    job = install(cache, f"shutil.copytree({str(result)!r}, job['dest'])")
    made = convert(str(DEMO), tmp_path / "made", "nvfp4", GPTQ).dest
    before, after = load_file(rounded / "model.safetensors"), load_file(made / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        near = name.endswith("weight_scale_2")  # a reciprocal of a reciprocal
        assert tensor.shape == after[name].shape
        assert (
            abs(float(tensor / after[name]) - 1) < 2**-22
            if near
            else bool((tensor == after[name]).all())
        ), name
    assert read_checkpoint(str(made)).scheme.name == read_checkpoint(str(rounded)).scheme.name
    wish = json.loads(job.read_text())
    assert len(wish["rows"]) == gptq.ROWS
    assert {len(row) for row in wish["rows"]} == {gptq.ROW_TOKENS}
    assert set(wish["modules"]) == {weight.module for weight in read_checkpoint(str(made)).nvfp4}


def test_without_llm_compressor_the_commands_that_install_it_are_named(
    cache: Path, tmp_path: Path
) -> None:
    line = refused(ExitCode.CONFIG, tmp_path / "x")
    folder = cache / "llm-compressor"
    assert f"python3 -m venv {folder} && {folder}/bin/pip install llmcompressor==" in line


def test_another_release_of_llm_compressor_is_refused(cache: Path, tmp_path: Path) -> None:
    install(cache, "pass", version="0.9.0")
    assert "has llmcompressor 0.9.0" in refused(ExitCode.CONFIG, tmp_path / "x")


def test_the_last_line_of_a_failure_is_shown(cache: Path, tmp_path: Path) -> None:
    install(cache, "sys.exit('out of memory')")
    assert "ended with 1: out of memory" in refused(ExitCode.CONFIG, tmp_path / "x")


def test_a_layer_that_it_left_out_is_named(cache: Path, tmp_path: Path) -> None:
    words = Wishes(exclude=("*.layers.0.mlp.*",))
    partly = convert(str(DEMO), tmp_path / "partly", "nvfp4", words).dest
    result = convert(str(partly), tmp_path / "ct", "compressed-tensors").dest
    install(cache, f"shutil.copytree({str(result)!r}, job['dest'])")
    assert "no NVFP4 weight for model.layers.0.mlp." in refused(ExitCode.CONFIG, tmp_path / "x")


def test_a_text_that_is_too_short_is_refused_with_its_size(cache: Path, tmp_path: Path) -> None:
    install(cache, "pass")
    line = refused(ExitCode.USAGE, tmp_path / "x", Wishes(method="gptq", texts=("Few words.",)))
    assert "expected at least 4096" in line.replace(":", "")


def test_words_that_contradict_the_method_are_refused(tmp_path: Path) -> None:
    line = refused(ExitCode.USAGE, tmp_path / "x", Wishes(method="gptq", four_over_six=True))
    assert "--four-over-six works only with --method round" in line
    with pytest.raises(NibbleError, match="--method awq"):
        read_wishes(None, None, False, (), "awq")
    with pytest.raises(NibbleError, match="work only with --to nvfp4"):
        convert(str(DEMO), tmp_path / "x", "modelopt", GPTQ)


def test_experts_are_refused_by_name() -> None:
    part = gptq.Part("model.layers.0.mlp.experts.0.gate_proj", 64, 64)
    with pytest.raises(NibbleError, match=r"mlp\.experts\.0\.gate_proj"):
        gptq.check_modules({"model.layers.0.mlp.experts.gate_up_proj": (part,)})
