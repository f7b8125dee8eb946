"""Rounding in one pass: layers that share a scale are computed together, with the bits of two
passes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nibble.checkpoint.convert import ahead, convert, one_pass
from nibble.checkpoint.convert.files import read_into
from nibble.checkpoint.convert.memory import Memory
from nibble.checkpoint.convert.one_pass import batches, fits
from nibble.checkpoint.convert.quantize import select
from nibble.checkpoint.convert.wishes import Wishes
from nibble.checkpoint.gguf.tensors import StoredBlocks
from nibble.checkpoint.headers import TensorInfo
from nibble.errors import ExitCode, NibbleError

LAYER = "model.layers.0."


def tensors(*leaves: str, file: str = "model.safetensors") -> list[TensorInfo]:
    names = [f"{LAYER}{leaf}.weight" for leaf in leaves]
    return [
        TensorInfo(name, "BF16", (32, 32), 2048, file, at * 2048) for at, name in enumerate(names)
    ]


def leaves_of(found: list[list[TensorInfo]]) -> list[list[str]]:
    return [[info.name.split(".")[-2] for info in batch] for batch in found]


def test_fused_layers_and_what_stands_between_them_are_a_batch() -> None:
    inside = tensors(
        *("self_attn.q_proj", "input_layernorm", "self_attn.v_proj", "self_attn.k_proj"),
        *("self_attn.o_proj", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"),
    )
    parts = select({info.name: info for info in inside}, 32, ())
    assert leaves_of(batches(inside, parts)) == [
        ["q_proj", "input_layernorm", "v_proj", "k_proj"],
        ["o_proj"],
        ["down_proj"],
        ["gate_proj", "up_proj"],
    ]


def test_a_group_in_two_files_or_too_large_a_batch_needs_two_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_file = {info.name: info for info in tensors("mlp.gate_proj", "mlp.up_proj")}
    parts = select(one_file, 32, ())
    assert fits(one_file, parts)
    monkeypatch.setattr(one_pass, "AHEAD_BYTES", 4095)
    assert not fits(one_file, parts)
    monkeypatch.undo()
    two_files = one_file | {info.name: info for info in tensors("mlp.up_proj", file="other")}
    assert not fits(two_files, parts)


@pytest.mark.parametrize("four_over_six", [False, True])
def test_one_pass_writes_the_bytes_of_two(
    four_over_six: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes = Wishes(four_over_six=four_over_six)
    convert("nibble-demo", tmp_path / "one", "nvfp4", wishes)
    monkeypatch.setattr(one_pass, "fits", lambda *_: False)
    convert("nibble-demo", tmp_path / "two", "nvfp4", wishes)
    one, two = (
        {file.name: file.read_bytes() for file in (tmp_path / made).iterdir() if file.is_file()}
        for made in ("one", "two")
    )
    assert one == two


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_do_not_change_the_bytes(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert("nibble-demo", tmp_path / "one", "nvfp4")
    monkeypatch.setattr(ahead, "THREADS", threads)
    convert("nibble-demo", tmp_path / "other", "nvfp4")
    one, other = (tmp_path / made / "model.safetensors" for made in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()


def test_memory_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All arrays come back, and few are new."""
    given, new = [], []
    take, give = Memory.take, Memory.give

    def taken(self: Memory, size: int) -> Any:
        array = take(self, size)
        new.append(id(array))
        given.append(array)  # which keeps its id from being another's
        return array

    def back(self: Memory, arrays: list[Any]) -> None:
        arrays = list(arrays)
        new_back.extend(id(array) for array in arrays)
        give(self, arrays)

    new_back: list[int] = []
    monkeypatch.setattr(Memory, "take", taken)
    monkeypatch.setattr(Memory, "give", back)
    monkeypatch.setattr(ahead, "THREADS", 1)
    convert("nibble-demo", tmp_path / "one", "nvfp4")
    assert sorted(new) == sorted(new_back)
    assert len(set(new)) < len(new)


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(100))
    with pytest.raises(NibbleError, match=r"model\.safetensors ends in mid-tensor") as caught:
        read_into(StoredBlocks("BF16", 64, path, 50), bytearray(64))
    assert caught.value.code == ExitCode.MODEL
