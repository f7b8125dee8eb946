"""The contents of a model folder as names and short digests. Equal content gives equal digests.

Configuration and tokenizer files are read in full. Of weights nibble reads the size, every tensor's
header and samples of the values: whole files would take minutes. Two revisions of one model have
equal headers and different values nearly everywhere, so samples find them.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from nibble.checkpoint.headers import LENGTH_BYTES, header_length, parse_header
from nibble.checkpoint.source import FolderSource, read_index, weight_files
from nibble.engine.installed import digest
from nibble.errors import NibbleError
from nibble.hub.files import COMMIT

SAMPLES, SAMPLE_BYTES = 64, 4096
WHOLE_BYTES = 32 << 20  # smaller files are read in full: an embedded demo, a vocabulary
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# What vLLM reads beside the weights. Pages for people and the canary's answers are left out: only
# the server reads those.
CONFIGURATION = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".yaml", ".yml")
NOT_READ = ("nibble-canary", "LICENSE", "README", "NOTICE")


def checkpoint_facts(folder: str) -> dict[str, str]:
    """Name -> digest or text, of files ("config.json"), tensors ("tensor w in model.safetensors")
    and values ("values in model.safetensors").

    Raises OSError for an unreadable file, NibbleError (MODEL) for an invalid header.
    """
    place = Path(folder)
    files = sorted({*_configuration(place), *_weights(place)})
    stamps = tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    return dict(_facts(stamps))


def _configuration(folder: Path) -> list[Path]:
    files = [path for path in folder.iterdir() if path.suffix in CONFIGURATION and path.is_file()]
    return [path for path in files if not path.name.startswith((".", *NOT_READ))]


def _weights(folder: Path) -> list[Path]:
    """The weight files that vLLM would load: a folder may also hold another format."""
    source = FolderSource(str(folder), "local", folder, None)
    loaded = weight_files(source, read_index(source))
    if loaded is not None:
        return [folder / name for name in loaded]
    return [path for path in folder.iterdir() if path.suffix in WEIGHTS and path.is_file()]


@functools.lru_cache(maxsize=8)
def _facts(stamps: tuple[tuple[str, int, int], ...]) -> dict[str, str]:
    """Cached until a file changes its size or time: a server asks again after each lost node."""
    facts: dict[str, str] = {}
    for path, size, _ in stamps:
        facts.update(
            _of_weights(Path(path), size) if path.endswith(WEIGHTS) else _of_file(Path(path))
        )
    return facts


def _of_file(path: Path) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        yield path.name, hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _of_weights(path: Path, size: int) -> Iterator[tuple[str, str]]:
    if path.suffix == ".safetensors":
        yield from _tensors(path, size)
    yield f"values in {path.name}", f"{size} bytes, {_sample(path, size)}"


def _tensors(path: Path, size: int) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        length = header_length(path.name, file.read(LENGTH_BYTES), size)
        header = file.read(length)
    for name, tensor in parse_header(path.name, header, size).items():
        where = f"{tensor.offset}+{tensor.nbytes}"
        yield (
            f"tensor {name} in {path.name}",
            f"{tensor.dtype} {json.dumps(tensor.shape)} at {where}",
        )


def _sample(path: Path, size: int) -> str:
    """Digest of the whole file, or of SAMPLES places spread over a large one."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
        for number in range(SAMPLES):
            file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            sha256.update(file.read(SAMPLE_BYTES))
    return sha256.hexdigest()[:16]


def summary(folder: str) -> dict[str, str]:
    """The folder, the digest of its facts and its revision (empty if unknown), or the problem.

    Equal content gives equal digests with and without a pinned revision, and for copies too.
    """
    result = {"folder": folder, "digest": "", "revision": "", "problem": ""}
    commit = Path(folder).resolve().name
    if COMMIT.fullmatch(commit):  # a snapshot of the Hub's cache
        result["revision"] = commit
    try:
        return result | {"digest": digest(checkpoint_facts(folder))}
    except NibbleError as error:
        return result | {"problem": error.what}
    except OSError as error:
        return result | {
            "problem": f"{error.filename or folder} cannot be read ({error.strerror or error})"
        }
