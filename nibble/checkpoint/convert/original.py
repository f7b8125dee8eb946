"""The model that `nibble convert` reads: a folder of Hugging Face's format, or a GGUF file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nibble.checkpoint import Checkpoint, read_checkpoint
from nibble.checkpoint.cloverlm import is_cloverlm
from nibble.checkpoint.convert.config import CONFIG_FILE, HF_QUANT_FILE
from nibble.checkpoint.convert.files import (
    BlocksOf,
    Buffer,
    Read,
    Values,
    folder_blocks,
    folder_values,
    index_names,
)
from nibble.checkpoint.gguf.file import is_gguf
from nibble.checkpoint.headers import TensorInfo
from nibble.errors import ExitCode, NibbleError
from nibble.hub.access import access, is_model_id
from nibble.hub.files import CANARY_FILE, WEIGHT_ONLY_CANARY_FILE, cached_snapshot
from nibble.hub.packaged import PACKAGED, not_here, packaged_here
from nibble.hub.progress import OnProgress, Progress
from nibble.machine.paths import cache_dir, demo_models


@dataclass(frozen=True)
class Original:
    """A model to convert: what it is, and how to read its tensors, as values or as they are stored.

    `others` copies or makes the files beside the weights until its end, while weights may be
    written. `bf16_folder` gives a folder with the
    model in BF16, for as long as it is open, as transformers reads it.
    """

    found: Checkpoint
    values: Values
    blocks: BlocksOf
    nbytes: int  # of its tensors as they are stored
    indexes: tuple[str, ...]
    others: Callable[[Path], AbstractContextManager[None]]
    bf16_folder: Callable[[Path], AbstractContextManager[Path]]

    def counted(
        self,
        stage: Literal["measure", "quantize"],
        tensors: Iterable[TensorInfo],
        report: OnProgress,
    ) -> Values:
        """`values`, which reports what it read of `tensors`."""
        count_up = counter(stage, tensors, report)

        def of(info: TensorInfo) -> Read:
            inner = self.values(info)

            def read(first: int, count: int) -> Buffer:
                data = inner(first, count)
                count_up(count)
                return data

            return read

        return of


def counter(
    stage: Literal["measure", "quantize"], tensors: Iterable[TensorInfo], report: OnProgress
) -> Callable[[int], None]:
    """A function that reports the progress in reading `tensors`, given how many more bytes of them,
    in BF16 or as a folder has them, were read.
    """
    done, total = 0, sum(info.nbytes for info in tensors)

    def count_up(count: int) -> None:
        nonlocal done
        done += count
        report(Progress(stage, done, total))

    return count_up


def original(source: str, to: str) -> Original:
    """The model at `source`: a GGUF file, a folder, a demo or a pulled model's id. Raises MODEL."""
    file = Path(os.path.expanduser(source))
    if is_gguf(file):
        from nibble.checkpoint.convert.gguf import gguf_model

        return gguf_model(file, to)
    _no_adapter(file)
    found = _read(source)
    if not found.tensors:
        raise _no_tensors(found)
    folder = found.path
    assert folder is not None
    left_out = {info.file for info in found.tensors.values()}
    if to == "nvfp4" and not is_cloverlm(found):
        left_out |= {CANARY_FILE, WEIGHT_ONLY_CANARY_FILE}  # recorded with other numbers
    return Original(
        found,
        folder_values(folder),
        folder_blocks(folder),
        sum(info.nbytes for info in found.tensors.values()),
        tuple(index_names(folder)),
        lambda dest: nullcontext(_copy_others(folder, dest, left_out)),
        lambda _: nullcontext(folder),
    )


# Weights in other formats, which a server of the new folder would not read
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".onnx_data", ".msgpack",
                 ".h5", ".ckpt")  # fmt: skip


def _no_adapter(folder: Path) -> None:
    """Raise CONFIG for a folder that holds a LoRA adapter alone."""
    if (folder / "adapter_config.json").is_file() and not (folder / CONFIG_FILE).is_file():
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{folder} is an adapter (LoRA), not a model",
            expected="a folder with config.json and the weights of a whole model",
            action="merge it into its model (PEFT: merge_and_unload) and convert the result",
        )


def _no_tensors(found: Checkpoint) -> NibbleError:
    others = [name for name in sorted(found.files) if name.endswith(OTHER_WEIGHTS)]
    return NibbleError(
        ExitCode.MODEL,
        what=f"{found.where} has no safetensors files" + (f", only {others[0]}" if others else ""),
        expected="weights in safetensors",
        action="load it with transformers and save it with save_pretrained",
    )


def _read(source: str) -> Checkpoint:
    """The checkpoint in a folder, under a demo's name or in the cache; it downloads nothing."""
    here = demo_models().get(source) or packaged_here(source, cache_dir())
    if here is None and (package := PACKAGED.get(source)):
        raise not_here(package)
    folder = here or Path(os.path.expanduser(source))
    if folder.is_dir() or not is_model_id(source):
        return read_checkpoint(str(folder))
    snapshot = cached_snapshot(source, None, access(os.environ).cache)
    if snapshot is None:
        what, action = f"{source} is not on this disk", f"run `nibble pull {source}`"
        raise NibbleError(
            ExitCode.MODEL, what=what, expected="a folder or a pulled model", action=action
        )
    return read_checkpoint(source, path=snapshot)


def _copy_others(source: Path, dest: Path, left_out: Iterable[str]) -> None:
    """Copy every file that is neither `left_out`, written nor weights."""
    skip = {*left_out, CONFIG_FILE, HF_QUANT_FILE}
    for parent, folders, names in os.walk(source, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            relative = path.relative_to(source)
            if name.endswith(OTHER_WEIGHTS) or relative.as_posix() in skip:
                continue
            if (dest / relative).exists() or not path.exists():
                continue
            (dest / relative.parent).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, dest / relative)
