"""Where a checkpoint is (a folder, the Hugging Face cache, the Hub), and what it contains.

It reads only JSON files and safetensors headers. From the Hub they come by range requests into
memory: inspecting a model writes nothing and downloads no weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from nibble.checkpoint.gguf.file import is_gguf
from nibble.checkpoint.headers import LENGTH_BYTES, TensorInfo, corrupt, header_length, parse_header
from nibble.errors import ExitCode, NibbleError
from nibble.hub.access import Access, access, hub_error, is_model_id, not_an_id, not_cached
from nibble.hub.files import COMMIT, RemoteFile, cached_snapshot, select, storage_folder
from nibble.machine.disk import is_folder, not_readable, unreadable_file

FIRST_READ_BYTES = 128 << 10  # holds most headers: one request a shard
REQUEST_SECONDS = 20
MAX_JSON_BYTES = 256 << 20  # an index of a million tensors is below 100 MB
PARALLEL_REQUESTS = 8
COPY_CHUNK_BYTES = 16 << 20
CONFIG_FILES = ("config.json", "params.json")

Tensors = dict[str, TensorInfo]
Index = tuple[str, Mapping[str, str]]  # its file, and by it the file that each tensor is in


@dataclass
class FolderSource:
    """A folder on this disk, given or a snapshot of the cache."""

    id: str
    kind: Literal["local", "cache", "hub"]
    path: Path
    revision: str | None

    @cached_property
    def files(self) -> Mapping[str, int]:
        """Size of every file; dangling links (a cache copied without its blobs) count as absent."""
        found: dict[str, int] = {}
        for parent, folders, names in os.walk(self.path, followlinks=True):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                full = Path(parent, name)
                if full.exists():
                    found[full.relative_to(self.path).as_posix()] = full.stat().st_size
        return found

    def read(self, file: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of `file`, fewer at its end. Raises MODEL."""
        try:
            with (self.path / file).open("rb") as handle:
                handle.seek(start)
                return handle.read(stop - start)
        except PermissionError:
            raise not_readable(self.path / file) from None
        except OSError as error:
            what = f"{self.path / file} cannot be read ({error.strerror})"
            raise NibbleError(
                ExitCode.MODEL, what=what, action="check the disk, or download the file again"
            ) from None


@dataclass
class HubSource:
    """A commit on the Hub, read by range requests."""

    id: str
    revision: str
    hub: Access
    listing: tuple[RemoteFile, ...]
    kind: Literal["local", "cache", "hub"] = "hub"
    path: Path | None = None

    @cached_property
    def files(self) -> Mapping[str, int]:
        """Size of every file by the Hub's listing."""
        return {file.path: file.size for file in self.listing}

    def read(self, file: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of `file`, fewer at its end, by a range request. Raises MODEL."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = hf_hub_url(self.id, file, revision=self.revision, endpoint=self.hub.endpoint)
        token = self.hub.token if self.hub.token else False
        headers = build_hf_headers(token=token) | {"Range": f"bytes={start}-{stop - 1}"}
        try:
            with get_session().stream(
                "GET", url, headers=headers, timeout=REQUEST_SECONDS
            ) as response:
                if response.status_code >= 400:
                    response.read()
                hf_raise_for_status(response)
                return _take(response, start if response.status_code == 200 else 0, stop - start)
        except Exception as error:
            raise hub_error(error, self.id, self.revision, self.hub) from error


Source = FolderSource | HubSource


def _take(response: Any, skip: int, count: int) -> bytes:
    """`count` bytes of a streamed answer after `skip`: a server that ignores Range must not send a
    whole shard.
    """
    data = bytearray()
    for chunk in response.iter_bytes():
        data += chunk
        if len(data) >= skip + count:
            break
    return bytes(data[skip : skip + count])


def open_source(
    model: str, revision: str | None, environ: Mapping[str, str], path: Path | None = None
) -> Source:
    """Find `model`: the folder `path`, a folder named `model`, the cache, or the Hub, in this
    order.

    The cache is used when it needs no question (offline, or `revision` is a commit that is there)
    and when the Hub cannot be reached. Raises MODEL (4); `unreachable` is set on the error where a
    network connection would fix it.
    """
    if path is not None:
        return _folder(model, path, "cache")  # an id whose snapshot the caller has fetched
    folder = Path(os.path.expanduser(model))
    if is_folder(folder):
        return _folder(model, folder, "local")
    if is_gguf(folder):
        raise needs_conversion(f"{model} is a GGUF file", model)
    if model.startswith((".", "/", "~")):
        raise NibbleError(
            ExitCode.MODEL,
            what=f"{model} is not a folder",
            expected="a folder with config.json",
            action="correct MODEL",
        )
    if not is_model_id(model):
        raise not_an_id(model)
    hub = access(environ)
    cached = cached_snapshot(model, revision, hub.cache)
    if cached and (hub.offline or COMMIT.fullmatch(revision or "")):
        return FolderSource(model, "cache", cached, cached.name)
    if hub.offline:
        return _partial_snapshot(model, revision, hub)
    return _from_hub(model, revision, hub, cached)


def needs_conversion(what: str, file: str) -> NibbleError:
    """The error for GGUF where a model in Hugging Face's format is expected."""
    return NibbleError(
        ExitCode.CONFIG,
        what=what,
        expected="a model in Hugging Face format",
        action=f"run `nibble convert {file} FOLDER --to nvfp4` and name FOLDER",
    )


def _folder(model: str, path: Path, kind: Literal["local", "cache"]) -> FolderSource:
    if blocked := unreadable_file(path):
        raise not_readable(blocked)
    # A snapshot of the cache says its commit in its name.
    commit = path.name if COMMIT.fullmatch(path.name) else None
    return FolderSource(model, kind, path, commit)


def _partial_snapshot(model: str, revision: str | None, hub: Access) -> FolderSource:
    """An incomplete snapshot, used offline: config.json still has most facts. Raises MODEL without
    one.
    """
    storage = storage_folder(hub.cache, model)
    commit = revision
    if not COMMIT.fullmatch(revision or ""):
        ref = storage / "refs" / (revision or "main")
        commit = ref.read_text().strip() if ref.is_file() else None
    snapshot = storage / "snapshots" / (commit or "-")
    if commit and any((snapshot / name).exists() for name in CONFIG_FILES):
        return FolderSource(model, "cache", snapshot, commit)
    raise not_cached(model, hub)


def _from_hub(model: str, revision: str | None, hub: Access, cached: Path | None) -> Source:
    from nibble.hub.pull import list_files

    try:
        commit, files = list_files(model, revision, hub)
    except NibbleError as error:
        if cached is not None and error.unreachable:
            return FolderSource(model, "cache", cached, cached.name)
        raise
    if current := cached_snapshot(model, commit, hub.cache):
        return FolderSource(model, "cache", current, commit)
    return HubSource(model, commit, hub, tuple(files))


def read_json(source: Source, file: str) -> dict[str, Any] | None:
    """The JSON object in `file`, or None without the file. Raises MODEL, naming it, for other
    content.
    """
    size = source.files.get(file)
    if size is None:
        return None
    try:
        # UTF-8 alone, as vLLM reads it: json would guess UTF-16 too.
        data = json.loads(
            (source.read(file, 0, min(size, MAX_JSON_BYTES)) if size else b"").decode()
        )
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise NibbleError(
            ExitCode.MODEL,
            what=f"{_name(source, file)} is not JSON",
            expected="a JSON object",
            action="download it again",
        )
    return data


def read_index(source: Source) -> Index | None:
    """The index of the weights, or None without one. Raises MODEL for an unreadable index."""
    indexes = [file for file in _root_files(source) if file.endswith(".safetensors.index.json")]
    if not indexes:
        return None
    index = read_json(source, indexes[0]) or {}
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        what = f"{_name(source, indexes[0])} has no weight_map"
        raise NibbleError(
            ExitCode.MODEL,
            what=what,
            expected="a map from tensor to file",
            action="download it again",
        )
    return indexes[0], weight_map


def weight_files(source: Source, index: Index | None) -> tuple[str, ...] | None:
    """The safetensors files that vLLM would load, or None for absent weights or another format.

    Raises MODEL when `index` names an absent shard.
    """
    if index is None:
        return tuple(file for file in _root_files(source) if file.endswith(".safetensors")) or None
    file, weight_map = index
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if shard not in source.files]
    if (source.kind == "cache" and missing) or (
        source.kind == "hub" and len(missing) == len(shards)
    ):
        return None  # an unfinished download, or a repository of an index alone: unknown until pull
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        what = f"{_name(source, file)} names {missing[0]}{more}, which is not there"
        raise NibbleError(
            ExitCode.MODEL,
            what=what,
            expected=f"{len(shards)} shards",
            action="copy or download the folder again",
        )
    return tuple(shards)


def _root_files(source: Source) -> list[str]:
    """The files in the root folder that a server needs, sorted."""
    listing = [RemoteFile(path, size, None, None) for path, size in source.files.items()]
    return [file.path for file in select(listing) if "/" not in file.path]


def read_tensors(source: Source, index: Index | None) -> Tensors | None:
    """Every tensor of the checkpoint by name, or None without safetensors headers.

    Raises MODEL, naming the file, for a corrupt or truncated one.
    """
    files = weight_files(source, index)
    if files is None:
        return None
    with ThreadPoolExecutor(1 if source.path else PARALLEL_REQUESTS) as pool:
        found = list(pool.map(lambda file: _read_header(source, file), files))
    tensors: Tensors = {}
    for part in found:
        for name in tensors.keys() & part.keys():  # vLLM loads both, and what it reads last stays
            _check_copies(source, tensors[name], part[name])
        tensors |= part
    return tensors


def _check_copies(source: Source, one: TensorInfo, other: TensorInfo) -> None:
    """Raise MODEL for a tensor that two files hold with different values; files on the Hub are not
    compared.
    """
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    starts = range(0, one.nbytes if same and source.path else 0, COPY_CHUNK_BYTES)
    for start in starts:
        stop = min(start + COPY_CHUNK_BYTES, one.nbytes)
        parts = [source.read(t.file, t.offset + start, t.offset + stop) for t in (one, other)]
        same = same and parts[0] == parts[1]
    if not same:
        what = (
            f"{one.name} is in {_name(source, one.file)} and in {other.file}, with different values"
        )
        raise NibbleError(
            ExitCode.MODEL,
            what=what,
            expected="each tensor once",
            action="remove the file that is not the model's",
        )


def _read_header(source: Source, file: str) -> Tensors:
    size, name = source.files[file], _name(source, file)
    first = source.read(file, 0, min(size, FIRST_READ_BYTES)) if size else b""
    length = header_length(name, first, size)
    header = first[LENGTH_BYTES : LENGTH_BYTES + length]
    if len(header) < length:
        header += source.read(file, len(first), LENGTH_BYTES + length)
    if len(header) < length:
        raise corrupt(name, f"it ends after {LENGTH_BYTES + len(header)} bytes", f"{size} bytes")
    return parse_header(name, header, size, file)


def _name(source: Source, file: str) -> str:
    return str(source.path / file) if source.path else f"{source.id}/{file}"


def download_bytes(source: Source) -> int:
    """Bytes of all files that a server needs."""
    return sum(
        f.size for f in select([RemoteFile(p, s, None, None) for p, s in source.files.items()])
    )
