"""Files of a model on the Hub and in the cache: which are needed, present and intact.

This module uses no network; `pull.py` fetches what is missing.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from nibble.machine.disk import not_readable, unreadable_file

READ_BYTES = 8 << 20
# Recorded answers of a model, in its folder (nibble/canary/references.py).
CANARY_FILE = "nibble-canary.json"
WEIGHT_ONLY_CANARY_FILE = (  # of W4A4 layers, served by kernels for weights alone
    "nibble-canary.weight-only.json"
)
COMMIT = re.compile(r"[0-9a-f]{40}")
# The same weights for other runtimes, and files that no runtime needs.
OTHER_FOLDERS = ("original/*", "onnx/*", "openvino/*", "coreml/*", "gguf/*", "metal/*", "mlx/*")
OTHER_WEIGHTS = (
    "*.bin", "*.pth", "*.pt", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.tflite",
    "*.onnx", "*.onnx_data", "*.gguf",
)  # fmt: skip
NOT_NEEDED = (
    "*.png", "*.jpg", "*.jpeg", "*.gif", "*.webp", "*.svg", "*.mp4", "*.pdf", ".git*", "*.zip",
    "*.tar.gz",
)  # fmt: skip


@dataclass(frozen=True)
class RemoteFile:
    """The Hub's record of a file: `sha256` for LFS files, git's `blob_id` for all."""

    path: str
    size: int
    sha256: str | None
    blob_id: str | None


def storage_folder(cache: Path, model: str) -> Path:
    """The folder of a model in a Hugging Face cache."""
    return cache / ("models--" + model.replace("/", "--"))


def select(files: Iterable[RemoteFile], load_format: str = "auto") -> tuple[RemoteFile, ...]:
    """The files that a server needs: one copy of the weights, config, tokenizer, code; no pictures.

    vLLM prefers `consolidated*.safetensors` (Mistral's) over `model*.safetensors` when `auto` finds
    it beside params.json, and so does this function (vllm 0.32 default_loader.py:170,
    config.py:828).
    """
    needed = [file for file in files if not _matches(file.path, NOT_NEEDED)]
    paths = {file.path for file in needed}
    if any(path.endswith(".safetensors") and "/" not in path for path in paths):
        needed = [file for file in needed if not _matches(file.path, OTHER_FOLDERS + OTHER_WEIGHTS)]
        has_both = {_is_consolidated(path) for path in paths if _is_root_weight(path)} == {
            True,
            False,
        }
        wants_mistral = load_format == "mistral" or (
            load_format == "auto" and "params.json" in paths
        )
        if has_both:
            needed = [
                f
                for f in needed
                if not _is_root_weight(f.path) or _is_consolidated(f.path) == wants_mistral
            ]
    elif any(path.endswith(".bin") for path in paths):
        needed = [
            file for file in needed if not _matches(file.path, OTHER_FOLDERS + OTHER_WEIGHTS[1:])
        ]
    return tuple(sorted(needed, key=lambda file: file.path))


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _is_root_weight(path: str) -> bool:
    return "/" not in path and path.endswith((".safetensors", ".safetensors.index.json"))


def _is_consolidated(path: str) -> bool:
    return path.startswith("consolidated")


def cached_snapshot(
    model: str, revision: str | None, cache: Path, load_format: str = "auto"
) -> Path | None:
    """The complete, verified and readable snapshot of `model` in `cache`, or None.

    Raises MODEL when it is present but this user cannot read it.
    """
    storage = storage_folder(cache, model)
    if not storage.is_dir():
        return None
    if blocked := _closed_folder(storage):
        raise not_readable(blocked)
    commit = revision if COMMIT.fullmatch(revision or "") else _ref(storage, revision or "main")
    if commit is None or not (snapshot := storage / "snapshots" / commit).is_dir():
        return None
    if unverified(storage, commit) or _missing_files(storage, snapshot, load_format):
        return None
    if blocked := unreadable_file(snapshot):
        raise not_readable(blocked)
    return snapshot


def _closed_folder(storage: Path) -> Path | None:
    folders = (storage, storage / "refs", storage / "snapshots", storage / "blobs")
    return next(
        (
            folder
            for folder in folders
            if folder.exists() and not os.access(folder, os.R_OK | os.X_OK)
        ),
        None,
    )


def _ref(storage: Path, name: str) -> str | None:
    try:
        return (storage / "refs" / name).read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _missing_files(storage: Path, snapshot: Path, load_format: str) -> list[str]:
    """Files that the snapshot lacks, by the Hub's cached listing, else by the weights' index."""
    listed = _cached_listing(storage, snapshot.name)
    if listed is not None:
        # A dangling link counts as present: `unreadable_file` names it; a download cannot fix it.
        wanted = [file.path for file in select(listed, load_format)]
        return [
            path
            for path in wanted
            if not (snapshot / path).exists() and not (snapshot / path).is_symlink()
        ]
    return missing_weights(snapshot)


def _cached_listing(storage: Path, commit: str) -> list[RemoteFile] | None:
    """The listing huggingface_hub 2.4 keeps of a commit (its _tree_cache.py, format 1), or None."""
    try:
        data = json.loads((storage / "trees" / f"{commit}.json").read_text())
        if data["format_version"] != 1:
            return None
        return [
            RemoteFile(path, entry["size"], entry.get("lfs_sha256"), entry.get("blob_id"))
            for path, entry in data["files"].items()
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def missing_weights(folder: Path) -> list[str]:
    """What a model folder lacks by its own index: config, weights, or shards."""
    missing = (
        []
        if (folder / "config.json").exists() or (folder / "params.json").exists()
        else ["config.json"]
    )
    indexes = sorted(folder.glob("*.safetensors.index.json")) + sorted(
        folder.glob("pytorch_model*.bin.index.json")
    )
    for index in indexes[:1]:
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return [*missing, index.name]
        return missing + sorted(name for name in shards if not (folder / name).exists())
    if not _has_weights(folder):
        missing.append("*.safetensors")
    return missing


# Vocabularies under the names that tokenizers give them (transformers, mistral-common, tiktoken,
# sentencepiece, TokenMonster).
_VOCABULARIES = (
    "tokenizer.json", "*.model", "*.model.v*", "vocab.json", "vocab.txt", "tekken.json",
    "*.tiktoken", "*.vocab", "*.bpe",
)  # fmt: skip


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder has a vocabulary, or a tokenizer without one (own code, or bytes)."""
    names = [path.name for path in folder.iterdir()]
    if any(_matches(name, _VOCABULARIES) for name in names):
        return True
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        return "auto_map" in config or "byt" in str(config.get("tokenizer_class")).lower()
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def _has_weights(folder: Path) -> bool:
    return any(path.suffix in (".safetensors", ".bin", ".pt", ".gguf") for path in folder.iterdir())


def unverified_record(storage: Path, commit: str) -> Path:
    """Where a pull notes what it is about to download."""
    return storage / f".nibble-unverified-{commit}.json"


def unverified(storage: Path, commit: str) -> set[str]:
    """Files whose download began without a hash check: what an interrupted pull leaves."""
    try:
        return set(json.loads(unverified_record(storage, commit).read_text()))
    except (OSError, ValueError):
        return set()


def corruption(
    path: Path, expected: RemoteFile, on_bytes: Callable[[int], None] = lambda _: None
) -> str | None:
    """How the file at `path` differs from what the Hub lists, or None."""
    size = path.stat().st_size
    if size != expected.size:
        return f"{size} bytes instead of {expected.size}"
    if expected.sha256 is None and expected.blob_id is None:
        return None
    # git names a blob by the sha1 of "blob SIZE\0" and the content.
    digest = (
        hashlib.sha256()
        if expected.sha256
        else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    )
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
            on_bytes(len(chunk))
    wanted = expected.sha256 or expected.blob_id or ""
    if digest.hexdigest() == wanted:
        return None
    return f"{digest.name} {digest.hexdigest()[:12]}… instead of {wanted[:12]}…"


def remove_blob(path: Path) -> None:
    """Remove a cached file with every link on the way to it (snapshot -> blob -> shared store)."""
    while True:
        target = path.parent / path.readlink() if path.is_symlink() else None
        path.unlink(missing_ok=True)
        if target is None:
            return
        path = target
