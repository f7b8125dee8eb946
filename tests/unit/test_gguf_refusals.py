"""GGUF files that `nibble convert` does not carry over: each is refused by name, and nothing of it
is left.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

from nibble.checkpoint import read_checkpoint
from nibble.checkpoint.convert import convert
from nibble.errors import ExitCode, NibbleError
from tests.support.models.gguf_models import (
    add_number,
    add_tokenizer,
    bytes_vocabulary,
    write_gguf,
)

VOCABULARY = len(bytes_vocabulary()[0])
H, WIDE = 64, 96
NUMBERS: dict[str, Any] = {
    "block_count": 1,
    "context_length": 512,
    "embedding_length": H,
    "feed_forward_length": WIDE,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 16,
}
SHAPES = {
    "token_embd.weight": (VOCABULARY, H),
    "output_norm.weight": (H,),
    "blk.0.attn_norm.weight": (H,),
    "blk.0.attn_q.weight": (H, H),
    "blk.0.attn_k.weight": (32, H),
    "blk.0.attn_v.weight": (32, H),
    "blk.0.attn_output.weight": (H, H),
    "blk.0.ffn_norm.weight": (H,),
    "blk.0.ffn_gate.weight": (WIDE, H),
    "blk.0.ffn_up.weight": (WIDE, H),
    "blk.0.ffn_down.weight": (H, WIDE),
}


def tensors(changes: Mapping[str, Any] | None = None) -> dict[str, numpy.ndarray]:
    """A tiny Llama; a shape of None removes a tensor."""
    numbers = numpy.random.default_rng(1)
    shapes = {**SHAPES, **(changes or {})}
    return {
        name: numbers.standard_normal(shape).astype(numpy.float32) / 8
        for name, shape in shapes.items()
        if shape is not None
    }


def write(
    tmp_path: Path,
    architecture: str = "llama",
    numbers: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Any] | None = None,
    general: Mapping[str, Any] | None = None,
    pre: str | None = "smollm",
) -> Path:
    found = {**NUMBERS, **(numbers or {})}
    return write_gguf(
        tmp_path / "m.gguf",
        architecture,
        {key: value for key, value in found.items() if value is not None},
        tensors(shapes),
        Type.Q8_0,
        pre,
        general,
    )


def refusal(path: Path, code: ExitCode, to: str = "nvfp4") -> str:
    """The line of a conversion that leaves nothing behind."""
    out = path.parent / "out"
    with pytest.raises(NibbleError) as caught:
        convert(str(path), out / "x", to)
    assert caught.value.code == code, caught.value.line()
    assert not out.exists() or not list(out.iterdir())
    return caught.value.line()


def test_the_file_converts(tmp_path: Path) -> None:
    """What the other tests break is sound."""
    done = convert(str(write(tmp_path)), tmp_path / "out", "nvfp4")
    assert done.weights == 7
    assert read_checkpoint(str(done.dest)).scheme.name == "W4A16_NVFP4"


@pytest.mark.parametrize("part", [0.02, 0.3, 0.9, 0.9999])
def test_truncated(part: float, tmp_path: Path) -> None:
    path = write(tmp_path)
    os.truncate(path, int(path.stat().st_size * part))
    assert "is truncated or damaged" in refusal(path, ExitCode.MODEL)


@pytest.mark.parametrize(
    ("start", "code", "says"),
    [
        (b"GGML\3\0\0\0", ExitCode.MODEL, "begins with 47 47 4d 4c; expected 47 47 55 46 (GGUF)"),
        (b"", ExitCode.MODEL, "begins with nothing"),
        (b"GG", ExitCode.MODEL, "begins with 47 47"),
        (b"GGUF\1\0\0\0", ExitCode.CONFIG, "is GGUF version 1; expected version 2 or 3"),
        (b"GGUF\x09\0\0\0", ExitCode.CONFIG, "is GGUF version 9"),
        (b"GGUF\0\0\0\3", ExitCode.CONFIG, "is a big-endian GGUF file"),
        (b"GGUF\3\0\0\0", ExitCode.MODEL, "is truncated or damaged"),
        (b"GGUF\3\0\0\0" + b"\xff" * 64, ExitCode.MODEL, "is truncated or damaged"),
    ],
)
def test_another_beginning(start: bytes, code: ExitCode, says: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(start)
    assert says in refusal(path, code)


def test_random_damage_ends_in_one_line(tmp_path: Path) -> None:
    """Bytes of the header changed at random: a refusal or a conversion, no other exception."""
    path = write(tmp_path)
    sound = path.read_bytes()
    numbers = numpy.random.default_rng(7)
    refused = 0
    for round_number in range(40):
        data = bytearray(sound)
        for place in numbers.integers(8, 1200 if round_number % 2 else len(sound) // 3, 3):
            data[place] ^= 1 << int(numbers.integers(8))
        path.write_bytes(data)
        dest = tmp_path / f"out-{round_number}"
        code = ended(path, dest)
        assert code in (ExitCode.OK, ExitCode.MODEL, ExitCode.CONFIG)
        assert dest.exists() == (code == ExitCode.OK)
        refused += code != ExitCode.OK
        shutil.rmtree(dest, ignore_errors=True)
    assert refused > 10


def ended(path: Path, dest: Path) -> ExitCode:
    """The exit code of a conversion. A defect of nibble raises."""
    try:
        convert(str(path), dest, "nvfp4")
    except NibbleError as error:
        return error.code
    return ExitCode.OK


@pytest.mark.parametrize("architecture", ["mamba", "deepseek2", "gpt-oss"])
def test_unknown_architecture(architecture: str, tmp_path: Path) -> None:
    line = refusal(write(tmp_path, architecture), ExitCode.CONFIG)
    assert f"has the architecture '{architecture}'; expected one of llama, qwen2" in line


@pytest.mark.parametrize(
    ("general", "says"),
    [
        ({"general.type": "mmproj"}, "is the vision part (mmproj) of a model"),
        ({"general.type": "adapter", "adapter.type": "lora"}, "is a LoRA adapter"),
        ({"general.type": "imatrix"}, "holds no model but: imatrix"),
    ],
)
def test_not_a_model(general: dict[str, Any], says: str, tmp_path: Path) -> None:
    assert says in refusal(write(tmp_path, general=general), ExitCode.CONFIG)


def test_a_vision_encoder(tmp_path: Path) -> None:
    assert "(mmproj)" in refusal(write(tmp_path, "clip"), ExitCode.CONFIG)


@pytest.mark.parametrize(
    ("numbers", "code", "says"),
    [
        ({"logit_scale": 2.0}, ExitCode.CONFIG, "nibble does not know what llama.logit_scale"),
        ({"rope.dimension_count": 8}, ExitCode.CONFIG, "RoPE rotates a part of each head"),
        ({"attention.value_length": 8}, ExitCode.CONFIG, "keys and values differ in size"),
        ({"rope.scaling.type": "longrope"}, ExitCode.CONFIG, "RoPE of type longrope"),
        ({"block_count": None}, ExitCode.MODEL, "has no llama.block_count"),
        ({"attention.head_count": 0}, ExitCode.CONFIG, "llama.attention.head_count is not above 0"),
        ({"attention.head_count": 5}, ExitCode.CONFIG, "blk.0.attn_q.weight has 64 rows"),
        ({"attention.head_count_kv": [2, 4]}, ExitCode.CONFIG, "differs from layer to layer"),
        ({"embedding_length": 32}, ExitCode.CONFIG, "token_embd.weight has 64 columns"),
        ({"block_count": 2}, ExitCode.MODEL, "has no tensor blk.1.attn_norm.weight and 8 more"),
        ({"block_count": 9**9}, ExitCode.MODEL, "has 387420489 layers"),
        ({"feed_forward_length": 128}, ExitCode.MODEL, "gate_proj"),
    ],
)
def test_numbers(numbers: dict[str, Any], code: ExitCode, says: str, tmp_path: Path) -> None:
    assert says in refusal(write(tmp_path, numbers=numbers), code)


@pytest.mark.parametrize(
    ("shapes", "code", "says"),
    [
        ({"blk.0.attn_sinks.weight": (4,)}, ExitCode.CONFIG, "has the tensor blk.0.attn_sinks"),
        ({"blk.0.attn_q.bias": (H,)}, ExitCode.CONFIG, "only attn_q have biases"),
        ({"blk.0.ffn_up.weight": None}, ExitCode.MODEL, "has no tensor blk.0.ffn_up.weight"),
        ({"token_embd.weight": None}, ExitCode.MODEL, "has no tensor token_embd.weight"),
        ({"blk.0.attn_q.weight": (H,)}, ExitCode.MODEL, "blk.0.attn_q.weight of shape [64]"),
        ({"blk.0.attn_k.weight": (2, 16, H)}, ExitCode.MODEL, "k_proj"),
        ({"token_embd.weight": (64, H)}, ExitCode.MODEL, "tokens and 64 embeddings"),
        ({"rope_freqs.weight": (8,)}, ExitCode.CONFIG, "are not those of Llama 3.1's RoPE"),
    ],
)
def test_tensors(shapes: dict[str, Any], code: ExitCode, says: str, tmp_path: Path) -> None:
    assert says in refusal(write(tmp_path, shapes=shapes), code)


def with_type(tmp_path: Path, kind: int) -> Path:
    """The type of blk.0.attn_q.weight replaced in the file's table."""
    path = write(tmp_path)
    data = path.read_bytes()
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # the number of dimensions, then two
    assert struct.unpack_from("<I", data, at) == (Type.Q8_0,)
    path.write_bytes(data[:at] + struct.pack("<I", kind) + data[at + 4 :])
    return path


def test_unknown_type(tmp_path: Path) -> None:
    assert "has tensors of the unknown type 96" in refusal(with_type(tmp_path, 96), ExitCode.CONFIG)


def test_a_type_that_cannot_be_dequantized(tmp_path: Path) -> None:
    line = refusal(with_type(tmp_path, Type.I8), ExitCode.CONFIG)
    assert "blk.0.attn_q.weight in I8, which cannot be dequantized" in line


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    found = tensors()
    found["blk.0.ffn_up.weight"][3, 5] = numpy.nan
    path = write_gguf(tmp_path / "m.gguf", "llama", NUMBERS, found)
    assert "up_proj.weight" in refusal(path, ExitCode.MODEL)


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors", "quartet-packed"])
def test_other_layouts(to: str, tmp_path: Path) -> None:
    line = refusal(write(tmp_path), ExitCode.CONFIG, to)
    assert f"which --to {to} does not read" in line and "--to nvfp4" in line


# --- models in several files ----------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=4, small_first_shard=True)
    for key, value in NUMBERS.items():
        add_number(writer, f"llama.{key}", value)
    add_tokenizer(writer, "smollm")
    for name, values in tensors().items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(tmp_path.glob("m-*.gguf"))


def test_a_model_in_parts(parts: list[Path], tmp_path: Path) -> None:
    assert len(parts) == 4
    whole = write_gguf(tmp_path / "whole.gguf", "llama", NUMBERS, tensors())
    one = convert(str(parts[0]), tmp_path / "one", "nvfp4").dest / "model.safetensors"
    other = convert(str(whole), tmp_path / "other", "nvfp4").dest / "model.safetensors"
    assert one.read_bytes() == other.read_bytes()


def test_a_part_that_is_not_the_first(parts: list[Path]) -> None:
    line = refusal(parts[2], ExitCode.USAGE)
    assert "m-00003-of-00004.gguf is part 3 of 4" in line
    assert "name m-00001-of-00004.gguf" in line


def test_a_part_that_is_missing(parts: list[Path]) -> None:
    parts[1].unlink()
    assert "m-00002-of-00004.gguf is missing" in refusal(parts[0], ExitCode.MODEL)


def test_parts_with_other_names(parts: list[Path]) -> None:
    renamed = parts[0].rename(parts[0].with_name("first.gguf"))
    assert "is one of 4 parts" in refusal(renamed, ExitCode.MODEL)


def test_a_part_of_another_model(parts: list[Path], tmp_path: Path) -> None:
    shutil.copy(write(tmp_path), parts[3])
    assert "is not a part of m-00001-of-00004.gguf" in refusal(parts[0], ExitCode.MODEL)


# --- disks and other commands ---------------------------------------------------------------------


def test_too_little_space_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 100, 100))
    line = refusal(path, ExitCode.NO_FIT)
    assert "the converted model has 0.00 GB" in line and "0.00 GB free" in line


LIMITED = """
import resource, sys
from nibble.cli.app import main
resource.setrlimit(resource.RLIMIT_FSIZE, (150000, 150000))
sys.argv = ["nibble", "convert", sys.argv[1], sys.argv[2], "--to", "nvfp4"]
main()
"""


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path) -> None:
    path = write(tmp_path)
    words = [sys.executable, "-B", "-c", LIMITED, str(path), str(tmp_path / "out" / "x")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.NO_FIT, done.stderr
    assert "nibble: error: writing" in done.stderr and "Traceback" not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


BAD_TOKENIZER = """
import dataclasses, sys
from pathlib import Path
from nibble.checkpoint.convert.gguf import gguf_model
from nibble.checkpoint.gguf import others
from nibble.errors import NibbleError
model = gguf_model(Path(sys.argv[1]), "nvfp4")
dest = Path(sys.argv[2])
dest.mkdir()
assert "transformers" not in sys.modules
if sys.argv[3] == "error":
    try:
        with model.others(dest):
            raise KeyError("weights")
    except KeyError:
        pass
    sys.exit(0)
start = others.pickle.dump
def changed(given, out):
    vocabulary = given[1].vocabulary
    vocabulary = dataclasses.replace(vocabulary, merges=(("no", "token"),))
    start((given[0], dataclasses.replace(given[1], vocabulary=vocabulary)), out)
others.pickle.dump = changed
try:
    with model.others(dest):
        print("weights")
except NibbleError as error:
    print(int(error.code), error.line())
"""


@pytest.mark.parametrize("what", ["tokenizer", "error"])
def test_the_second_process(what: str, tmp_path: Path) -> None:
    """Its refusal is the conversion's; it ends with a conversion that fails."""
    words = [sys.executable, "-B", "-c", BAD_TOKENIZER, str(write(tmp_path))]
    done = subprocess.run(
        [*words, str(tmp_path / "out"), what], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    if what == "tokenizer":
        first, second = done.stdout.splitlines()
        assert first == "weights"
        assert second.startswith(f"{int(ExitCode.MODEL)} "), second
    else:
        assert not list((tmp_path / "out").glob("tokenizer*"))


UNUSED = """
from nibble.checkpoint.gguf.others import SecondProcess
second = SecondProcess()
process = second._process
del second
print(process.returncode)
"""


def test_the_second_process_ends_with_a_conversion_that_does_not_begin() -> None:
    done = subprocess.run(
        [sys.executable, "-B", "-c", UNUSED], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("-9\n", "", 0)


def test_serving_points_to_convert(tmp_path: Path) -> None:
    path = write(tmp_path)
    for named in (path, tmp_path):
        with pytest.raises(NibbleError) as caught:
            read_checkpoint(str(named))
        assert caught.value.code == ExitCode.CONFIG
        assert f"run `nibble convert {path} FOLDER --to nvfp4`" in caught.value.line()


def test_a_file_without_the_suffix(tmp_path: Path) -> None:
    """Ollama's blobs are named by their hash."""
    path = write(tmp_path).rename(tmp_path / "sha256-6a0746a1ec1a")
    assert convert(str(path), tmp_path / "out", "nvfp4").weights == 7
