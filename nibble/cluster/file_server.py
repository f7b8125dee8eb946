"""One download for the cluster: a node with a model's files offers them to the others.

HTTP with ranges on the agent's port, for clients with the token. The receiver compares every file's
sha256 and resumes a broken transfer.
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
ATTEMPTS = 5  # without a byte
PAUSE_S = 0.5
PARTIAL = ".nibble-part"
# Fetched last: without the index that names them, the first of several would look like a whole
# model after an interruption.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


class Offers:
    """The folders that this node offers, each under a name."""

    def __init__(self) -> None:
        self._folders: dict[str, Path] = {}
        self._lock = threading.Lock()
        self._takers = 0
        self._taken = -math.inf

    def add(self, folder: Path) -> str:
        """Offer `folder`; the name that `/model` and `/files` know it by."""
        name = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        with self._lock:
            self._folders[name] = folder
        return name

    def handlers(self) -> dict[str, Handler]:
        """For the agent's POST paths: what is offered, with size and sha256 of every file."""

        def model(body: Mapping[str, Any]) -> dict[str, Any]:
            with self._lock:
                offered = dict(self._folders)
            name = str(body.get("name") or next(iter(offered), ""))
            if name not in offered:
                raise ValueError("no model is offered yet")
            folder = offered[name]
            with self._giving():
                files = [describe(folder, path) for path in files_of(folder)]
            return {"name": name, "folder": str(folder), "files": files}

        return {"/model": model}

    def senders(self) -> dict[str, Sender]:
        """For the agent's GET paths."""
        return {"files": self._send}

    def _send(self, request: Any, rest: str) -> None:
        name, _, path = unquote(rest).partition("/")
        with self._lock:
            folder = self._folders.get(name)
        if folder is None or path not in {
            str(one) for one in files_of(folder)
        }:  # nothing above or beside the folder
            request.reply(404, {"error": "no such file"})
            return
        with self._giving():
            send_file(request, folder / path)

    def idle_s(self) -> float:
        """Seconds since another node took something; infinite where none ever did."""
        with self._lock:
            return 0.0 if self._takers else time.monotonic() - self._taken

    @contextlib.contextmanager
    def _giving(self) -> Iterator[None]:
        with self._lock:
            self._takers += 1
        try:
            yield
        finally:
            with self._lock:
                self._takers, self._taken = self._takers - 1, time.monotonic()


def files_of(folder: Path) -> list[Path]:
    """Files below `folder`, relative to it, with links followed and without unfinished files."""
    found = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path for path in found if not path.name.endswith(PARTIAL)]


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
    """`path`, or from the byte on that a `Range: bytes=N-` names."""
    asked = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
    first = int(asked[1]) if asked else 0
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = min(first, size)
        request.send_response(206 if asked else 200)
        request.send_header("Content-Length", str(size - first))
        if asked:
            request.send_header("Content-Range", f"bytes {first}-{max(first, size - 1)}/{size}")
        request.end_headers()
        # By the kernel, or in pieces through TLS; waits where the other side reads slowly, up to
        # the connection's timeout.
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
    """The model that the agent at `address` offers, complete and verified in `destination`.

    Files with the right sha256 stay. Raises AgentError if the head offers nothing (400) or does not
    answer (0), NO_FIT before the transfer if the rest does not fit on the disk, MODEL if files do
    not arrive or arrive wrong.
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
    """What has come of `target` so far."""
    return target.with_name(target.name + PARTIAL)


def _is_below(target: Path, folder: Path) -> bool:
    """Whether a file `target` would lie in `folder`. A link at its place does not count: the
    file takes that place.
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
    except OSError as failed:
        what = f"{target.parent} cannot be made ({failed.strerror or failed})"
        raise NibbleError(
            ExitCode.MODEL, what=what, expected="a writable folder", action="set NIBBLE_CACHE_DIR"
        ) from None
    partial = _partial(target)
    error: Exception = ConnectionError("the connection ended early")
    left, wrong = ATTEMPTS, 0
    while left and wrong < ATTEMPTS:
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
            left = ATTEMPTS  # progress resets the attempts
        if size < file["size"]:
            left -= 1
            time.sleep(PAUSE_S)
            continue
        with partial.open("rb") as whole:
            if hashlib.file_digest(whole, "sha256").hexdigest() == file["sha256"]:
                partial.rename(target)
                return
        error, wrong = ValueError("its sha256 is wrong"), wrong + 1
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
    """Where this node keeps `model` from the head."""
    return cache / "cluster-models" / model.strip("/").replace("/", "--")


def fetch_from_head(
    settings: Settings, environ: Mapping[str, str], head: str, say: Callable[[str], None]
) -> Path:
    """The head's model, complete in this node's cache folder; waits until the head offers it.

    Raises CLUSTER where it offers nothing within NIBBLE_CLUSTER_WAIT_SECONDS or refuses the token.
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
