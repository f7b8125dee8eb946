"""One download for the cluster: a node that has a model's files offers them to the others.

It sends them with HTTP ranges on the agent's port, to clients with the token. The receiver compares
every file's sha256 and resumes a broken transfer.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from nibble.cluster.agent import AgentError, Handler, Sender, call, connect
from nibble.cluster.roster import BEAT_S
from nibble.cluster.token import members_token
from nibble.errors import ExitCode, NibbleError
from nibble.hub.pull import check_disk
from nibble.machine.disk import free_bytes
from nibble.machine.paths import cache_dir
from nibble.settings.options import Settings

CHUNK_BYTES = 4 << 20
TIMEOUT_S = 60.0
HASH_TIMEOUT_S = 3600.0  # a terabyte at 300 MB/s
ATTEMPTS = 5  # in a row, without progress
PAUSE_S = 0.5
PARTIAL = ".nibble-part"
# Fetched last: after an interruption, the first of several weight files without the index would
# look like a complete model.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


class Offers:
    """The folders that this node offers, each under a short name."""

    def __init__(self) -> None:
        self._folders: dict[str, Path] = {}
        self._lock = threading.Lock()
        self._readers = 0
        self._last_read = -math.inf

    def add(self, folder: Path) -> str:
        """Offer `folder`; the name that `/model` and `/files` use for it."""
        name = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        with self._lock:
            self._folders[name] = folder
        return name

    def handlers(self) -> dict[str, Handler]:
        """The agent's POST paths: `/model` lists every offered file with its size and sha256."""

        def model(body: Mapping[str, Any]) -> dict[str, Any]:
            with self._lock:
                offered = dict(self._folders)
            name = str(body.get("name") or next(iter(offered), ""))
            if name not in offered:
                raise ValueError("no model is offered yet")
            folder = offered[name]
            with self._reading():
                files = [describe(folder, path) for path in files_of(folder)]
            return {"name": name, "folder": str(folder), "files": files}

        return {"/model": model}

    def senders(self) -> dict[str, Sender]:
        """The agent's GET paths: `/files` sends one file."""
        return {"files": self._send}

    def _send(self, request: Any, rest: str) -> None:
        name, _, path = unquote(rest).partition("/")
        with self._lock:
            folder = self._folders.get(name)
        # The list of files excludes every path outside of the folder.
        if folder is None or path not in {str(file) for file in files_of(folder)}:
            request.reply(404, {"error": "no such file"})
            return
        with self._reading():
            send_file(request, folder / path)

    def idle_s(self) -> float:
        """Seconds since another node last read from here; infinite if no node ever did."""
        with self._lock:
            return 0.0 if self._readers else time.monotonic() - self._last_read

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock:
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers, self._last_read = self._readers - 1, time.monotonic()


def files_of(folder: Path) -> list[Path]:
    """Files below `folder`, as relative paths. Follows links; leaves out unfinished transfers."""
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path for path in files if not path.name.endswith(PARTIAL)]


def describe(folder: Path, path: Path) -> dict[str, Any]:
    """Path, size and sha256 of one file."""
    stat = (folder / path).stat()
    return {
        "path": str(path),
        "size": stat.st_size,
        "sha256": _sha256(folder / path, stat.st_size, stat.st_mtime_ns),
    }


@functools.lru_cache(maxsize=4096)
def _sha256(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def send_file(request: BaseHTTPRequestHandler, path: Path) -> None:
    """Send `path`, from the byte that a `Range: bytes=N-` header names."""
    byte_range = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
    first = int(byte_range[1]) if byte_range else 0
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = min(first, size)
        request.send_response(206 if byte_range else 200)
        request.send_header("Content-Length", str(size - first))
        if byte_range:
            request.send_header("Content-Range", f"bytes {first}-{max(first, size - 1)}/{size}")
        request.end_headers()
        # The kernel sends the file; with TLS Python sends it in pieces. A slow reader holds it up
        # for at most the connection's timeout.
        if request.connection.sendfile(file, first) < size - first:
            request.close_connection = True  # the file has become shorter


def fetch_model(
    address: str,
    token: str,
    environ: Mapping[str, str],
    destination: Path,
    say: Callable[[str], None],
    name: str = "",
) -> Path:
    """Fetch the model that the agent at `address` offers; complete and verified in `destination`.

    Keeps files that have the right sha256. Raises AgentError if the agent offers nothing (400) or
    does not answer (0), NO_FIT before the transfer if the rest does not fit on the disk, MODEL if a
    file does not arrive or has the wrong sha256.
    """
    offer = call(address, "/model", token, {"name": name}, HASH_TIMEOUT_S, environ)
    files = sorted(offer["files"], key=lambda file: str(file["path"]).endswith(_WEIGHTS))
    for file in files:
        if not _is_below(destination / file["path"], destination):
            what = f"the node {address} offers a file outside of the model: {file['path']}"
            raise NibbleError(ExitCode.MODEL, what=what, action="do not trust that node")
    absent = [file for file in files if not _is_here(destination, file)]
    fetch_bytes = sum(
        max(0, file["size"] - _size(_partial(destination / file["path"]))) for file in absent
    )
    model, free = f"the model from {address}", free_bytes(destination)
    check_disk(model, fetch_bytes, free, destination, "NIBBLE_CACHE_DIR")
    for number, file in enumerate(absent, 1):
        say(
            f"fetching {file['path']} from {address} ({number} of {len(absent)},"
            f" {file['size'] / 1e9:.2f} GB)"
        )
        _fetch_file(address, token, environ, offer["name"], file, destination / file["path"])
    return destination


def _is_here(folder: Path, file: Mapping[str, Any]) -> bool:
    path = Path(file["path"])
    return (folder / path).is_file() and describe(folder, path)["sha256"] == file["sha256"]


def _partial(target: Path) -> Path:
    """The file that holds the received part of `target`."""
    return target.with_name(target.name + PARTIAL)


def _is_below(target: Path, folder: Path) -> bool:
    """Whether the file `target` would lie in `folder`. A link at that path does not matter: the new
    file replaces it.
    """
    return target.name != ".." and target.parent.resolve().is_relative_to(folder.resolve())


def _fetch_file(
    address: str,
    token: str,
    environ: Mapping[str, str],
    name: str,
    file: Mapping[str, Any],
    target: Path,
) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        what = f"{target.parent} cannot be made ({failure.strerror or failure})"
        raise NibbleError(
            ExitCode.MODEL, what=what, expected="a writable folder", action="set NIBBLE_CACHE_DIR"
        ) from None
    partial = _partial(target)
    error: Exception = ConnectionError("the connection ended early")
    attempts_left, wrong_sums = ATTEMPTS, 0
    while attempts_left and wrong_sums < ATTEMPTS:
        first = _size(partial)
        try:
            with partial.open("ab") as out:
                for data in _receive(
                    address, token, environ, f"/files/{name}/{quote(file['path'])}", first
                ):
                    out.write(data)
        except (OSError, http.client.HTTPException) as broken:
            error = broken
        if (size := _size(partial)) > first:
            attempts_left = ATTEMPTS  # progress resets the attempts
        if size < file["size"]:
            attempts_left -= 1
            time.sleep(PAUSE_S)
            continue
        with partial.open("rb") as received:
            if hashlib.file_digest(received, "sha256").hexdigest() == file["sha256"]:
                partial.rename(target)
                return
        error, wrong_sums = ValueError("its sha256 is wrong"), wrong_sums + 1
        partial.unlink()
    what = f"{file['path']} did not come from {address} whole ({error})"
    raise NibbleError(
        ExitCode.MODEL,
        what=what,
        action="look at the network between the nodes and at the disk, and start again",
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _receive(
    address: str, token: str, environ: Mapping[str, str], path: str, first: int
) -> Iterator[bytes]:
    headers = {
        "Authorization": f"Bearer {token}",
        **({"Range": f"bytes={first}-"} if first else {}),
    }
    with contextlib.closing(connect(address, TIMEOUT_S, environ)) as connection:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        if response.status not in (200, 206):
            raise ConnectionError(f"answered {response.status}")
        while data := response.read(CHUNK_BYTES):
            yield data


def models_folder(cache: Path, model: str) -> Path:
    """Where this node keeps the head's `model`."""
    return cache / "cluster-models" / model.strip("/").replace("/", "--")


def fetch_from_head(
    settings: Settings, environ: Mapping[str, str], head: str, say: Callable[[str], None]
) -> Path:
    """Wait until the head offers its model, and fetch it into this node's cache folder.

    Raises CLUSTER if the head offers nothing within NIBBLE_CLUSTER_WAIT_SECONDS or refuses the
    token, and what `fetch_model` raises.
    """
    token = members_token(settings, environ, "fetching from the head")
    destination = models_folder(settings.cache_dir or cache_dir(environ), str(settings.model))
    deadline = time.monotonic() + settings.cluster_wait_seconds
    while True:
        try:
            return fetch_model(head, token, environ, destination, say)
        except AgentError as error:
            if error.status == 401:
                what = f"the head at {head} refused this node's token"
                action = "set RAY_AUTH_TOKEN_FILE to a copy of the head's file"
                raise NibbleError(
                    ExitCode.CLUSTER, what=what, expected="the head's token", action=action
                ) from None
            if time.monotonic() >= deadline:
                what = (
                    f"the head at {head} offers no model ({error}) after"
                    f" {settings.cluster_wait_seconds} s"
                )
                raise NibbleError(
                    ExitCode.CLUSTER,
                    what=what,
                    action="start rank 0, or unset NIBBLE_CLUSTER_MODEL",
                ) from None
            time.sleep(BEAT_S)
