"""A GGUF file as the model to convert: its values in BF16 as they are read, its tokenizer written
and checked.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from nibble.checkpoint import describe
from nibble.checkpoint.convert.ahead import ahead
from nibble.checkpoint.convert.files import Values, rewrite
from nibble.checkpoint.convert.original import Original
from nibble.checkpoint.gguf.families import config_of, family_of, missing_tensors
from nibble.checkpoint.gguf.file import open_gguf
from nibble.checkpoint.gguf.others import Others, SecondProcess, write_others
from nibble.checkpoint.gguf.tensors import blocks, infos, stored_tensors, values
from nibble.checkpoint.gguf.vocabulary import read_vocabulary
from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.source import FolderSource
from nibble.errors import ExitCode, NibbleError

INDEX = "model.safetensors.index.json"


def gguf_model(path: Path, to: str) -> Original:
    """The model in a GGUF file. Raises MODEL for a damaged file, CONFIG for one that nibble cannot
    carry over, by the name of what it cannot.
    """
    if to != "nvfp4":
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{path} is a GGUF file, which --to {to} does not read",
            expected="an NVFP4 checkpoint",
            action="quantize it with --to nvfp4",
        )
    _need_library()
    second_process = SecondProcess()
    file = open_gguf(path)
    family = family_of(file)
    if missing := missing_tensors(file, family):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise NibbleError(
            ExitCode.MODEL,
            what=f"{path} has no tensor {missing[0]}{more}",
            expected=f"every tensor of {family.architecture}",
            action="download the file again",
        )
    config = config_of(file, family)
    vocabulary = read_vocabulary(file)
    if len(vocabulary.tokens) > config["vocab_size"]:
        raise NibbleError(
            ExitCode.MODEL,
            what=f"{path} has {len(vocabulary.tokens)} tokens"
            f" and {config['vocab_size']} embeddings",
            expected="an embedding for each token",
            action="convert another GGUF file of this model",
        )
    stored = stored_tensors(file, family, config)
    tensors, read = infos(stored), values(stored)
    # config.json is a result here: what it says of the file was checked above
    found = describe(FolderSource(str(path), "local", path, None), config, None, tensors, {})
    for problem in found.problems:
        raise problem.error(found.where)
    files = {info.file for info in tensors.values()}

    given = Others(file.path, file.metadata, vocabulary, config)

    @contextmanager
    def bf16_folder(beside: Path) -> Iterator[Path]:
        with TemporaryDirectory(prefix=".bf16.", dir=beside) as folder:
            write_others(Path(folder), given)
            write_bf16(Path(folder), tensors, read)
            yield Path(folder)

    indexes = (INDEX,) if len(files) > 1 else ()
    return Original(
        found,
        read,
        blocks(stored),
        sum(int(tensor.n_bytes) for tensor in file.tensors.values()),
        indexes,
        lambda dest: second_process.writing(dest, given),
        bf16_folder,
    )


def write_bf16(dest: Path, tensors: dict[str, TensorInfo], read: Values) -> None:
    """Write the tensors of a GGUF model unquantized."""
    several = len({info.file for info in tensors.values()}) > 1
    rewrite(
        dest,
        tensors,
        lambda info: [info],
        lambda inside: ahead(
            inside, lambda info: [read(info)(0, info.nbytes)], lambda info: info.nbytes
        ),
        (INDEX,) if several else (),
    )


def _need_library() -> None:
    for module in ("gguf", "transformers"):
        if importlib.util.find_spec(module) is None:
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"`nibble convert` of a GGUF file needs {module}",
                action="run `make setup`, then .venv/bin/nibble",
            )
