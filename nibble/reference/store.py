"""Stores computed references in nibble's cache: one per state of a checkpoint and activations."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from nibble.checkpoint import Checkpoint

FORMAT = 2  # version of the files; other versions are ignored
FOLDER = "references"
LAYERS = ".layers.safetensors"
# Files beside the weights that determine the tokens and the module.
DECIDING = (
    "config.json",
    "hf_quant_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
)


@dataclass(frozen=True)
class Request:
    """The arguments of the process that computes a reference (compute.py).

    model: id or path as given; path: the checkpoint's folder; out: the file to write; activations:
    fp4 or bf16; answer_tokens: per prompt; keeps: weights stay in memory after the first read.
    """

    model: str
    path: str
    out: str
    activations: str
    dtype: str = "float32"
    device: str = "cpu"
    answer_tokens: int = 16
    keeps: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Request:
        return cls(**data)


def reference_path(cache: Path, checkpoint: Checkpoint, activations: str) -> Path:
    """The path of a checkpoint's reference in the folder `cache`, whether or not it exists."""
    name = "".join(c if c.isalnum() or c in "-._" else "_" for c in Path(checkpoint.id).name)[:60]
    return cache / FOLDER / f"{name}-{activations}-{identity(checkpoint)}.json"


def identity(checkpoint: Checkpoint) -> str:
    """A digest of everything that determines a reference.

    It covers the tensors' headers, the size and time of each weight file, the files of DECIDING,
    and the versions of the format and of transformers.
    """
    assert checkpoint.path is not None
    digest = hashlib.sha256()
    for name, info in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {info.dtype} {info.shape} {info.file} {info.offset}\n".encode())
    for file in sorted({info.file for info in checkpoint.tensors.values()}):
        status = (checkpoint.path / file).stat()
        digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    for file in DECIDING:
        path = checkpoint.path / file
        digest.update(file.encode() + (path.read_bytes() if path.is_file() else b"-"))
    digest.update(f"{FORMAT} {versions()}".encode())
    return digest.hexdigest()[:16]


def versions() -> str:
    """The library that computes, with its version, for `identity` and the file's head."""
    try:
        return f"transformers {metadata.version('transformers')}"
    except metadata.PackageNotFoundError:
        return "no transformers"


def write_reference(
    request: Request, content: Mapping[str, Any], tensors: Mapping[str, Any]
) -> None:
    """Write the tensors and the JSON file, each atomically.

    The JSON file comes last, because readers look for it first.
    """
    out = Path(request.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    layers = out.with_name(out.stem + LAYERS)
    scratch = out.with_name(f".{os.getpid()}-{out.name}")
    if tensors:
        from safetensors.torch import save_file

        save_file(dict(tensors), scratch)
        scratch.replace(layers)
    head = {
        "format": FORMAT,
        "computed": f"nibble reference, {versions()}, {request.dtype}",
        "activations": request.activations,
        "layer_file": layers.name if tensors else None,
    }
    scratch.write_text(json.dumps({**head, **content}, ensure_ascii=False))
    scratch.replace(out)


def layer_file(path: Path, data: Mapping[str, Any]) -> Path | None:
    """The file of tensors beside the reference `path` with the content `data`, if it exists."""
    name = data.get("layer_file")
    file = path.with_name(str(name)) if name else None
    return file if file is not None and file.is_file() else None


def read_reference(path: Path) -> dict[str, Any] | None:
    """The content of a reference, or None if the file is missing, invalid or of another FORMAT."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and data.get("format") == FORMAT else None


def layer_files(references: Mapping[str, Path]) -> dict[str, str]:
    """Format of activations -> path of the tensors, for the workers. `references`: JSON files."""
    files = {
        kind: layer_file(path, read_reference(path) or {}) for kind, path in references.items()
    }
    return {kind: str(file.absolute()) for kind, file in files.items() if file is not None}
