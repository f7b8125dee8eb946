"""Computed references in nibble's cache, one for each checkpoint state and activation kind."""

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

FORMAT = 2  # of the files; others are not read
FOLDER = "references"
LAYERS = ".layers.safetensors"
# Beside the weights: what decides about tokens and about the module.
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
    """What the computing process is asked for. `activations`: fp4 or bf16; `keeps`: weights stay
    in memory once read.
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
    """Where the reference of a checkpoint on disk lies, or would."""
    name = "".join(c if c.isalnum() or c in "-._" else "_" for c in Path(checkpoint.id).name)[:60]
    return cache / FOLDER / f"{name}-{activations}-{identity(checkpoint)}.json"


def identity(checkpoint: Checkpoint) -> str:
    """A digest of the headers, of each weight file's size and time, of the small files, and of
    what computes.
    """
    assert checkpoint.path is not None
    digest = hashlib.sha256()
    for name, info in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {info.dtype} {info.shape} {info.file} {info.offset}\n".encode())
    for file in sorted({info.file for info in checkpoint.tensors.values()}):
        found = (checkpoint.path / file).stat()
        digest.update(f"{file} {found.st_size} {found.st_mtime_ns}\n".encode())
    for file in DECIDING:
        path = checkpoint.path / file
        digest.update(file.encode() + (path.read_bytes() if path.is_file() else b"-"))
    digest.update(f"{FORMAT} {versions()}".encode())
    return digest.hexdigest()[:16]


def versions() -> str:
    try:
        return f"transformers {metadata.version('transformers')}"
    except metadata.PackageNotFoundError:
        return "no transformers"


def write_reference(request: Request, found: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Both files, each all of it or nothing; the one that readers look for comes last."""
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
    scratch.write_text(json.dumps({**head, **found}, ensure_ascii=False))
    scratch.replace(out)


def layer_file(path: Path, data: Mapping[str, Any]) -> Path | None:
    """The tensors beside a reference, where there are any."""
    name = data.get("layer_file")
    found = path.with_name(str(name)) if name else None
    return found if found is not None and found.is_file() else None


def read_reference(path: Path) -> dict[str, Any] | None:
    """A reference as it was written; None where there is none of this format that can be read."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and data.get("format") == FORMAT else None


def layer_files(references: Mapping[str, Path]) -> dict[str, str]:
    """Activations -> tensors for the workers' comparison."""
    found = {
        kind: layer_file(place, read_reference(place) or {}) for kind, place in references.items()
    }
    return {kind: str(file.absolute()) for kind, file in found.items() if file is not None}
