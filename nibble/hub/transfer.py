"""Downloads large files over HTTP, resumes after any interruption, and never waits forever.

huggingface_hub 2.4 keeps no part of a file (file_download.py:1997: each try writes a new file and
removes it), and its Xet transport has no limit on silence. So nibble fetches the files with a
sha256 by range requests into blobs/SHA256.nibble.incomplete. huggingface_hub handles the rest of
the cache.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nibble.errors import NibbleError
from nibble.hub.access import Access, in_words, unreachable
from nibble.hub.files import RemoteFile
from nibble.machine.disk import gib

PART = ".nibble.incomplete"
TRIES = 3  # in a row without a byte
BACKOFF_S = 1.0  # times the tries that failed
PARALLEL = 4
STALL_VARIABLE = "NIBBLE_DOWNLOAD_STALL_SECONDS"
_LOCAL = (
    errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EFBIG,
)  # fmt: skip


@dataclass(frozen=True)
class Blobs:
    """Where a commit's files go; a try ends after `stall_s` seconds without a byte."""

    model: str
    commit: str
    hub: Access
    folder: Path
    stall_s: float

    def path(self, file: RemoteFile) -> Path:
        """The finished file, named as huggingface_hub names it."""
        assert file.sha256 is not None
        return self.folder / file.sha256

    def part(self, file: RemoteFile) -> Path:
        """The unfinished file."""
        return self.folder / f"{file.sha256}{PART}"

    def present_bytes(self, files: Sequence[RemoteFile]) -> int:
        """Bytes that earlier tries left of `files`."""
        return sum(_size(self.part(file)) for file in files if file.sha256)


def fetch_blobs(blobs: Blobs, files: Sequence[RemoteFile]) -> None:
    """Fetch every file with a sha256 into the blobs folder; the caller verifies the contents.

    Raises NibbleError(MODEL) once a file has not grown in three tries, and huggingface_hub's error
    for a refusal.
    """
    wanted = [file for file in files if file.sha256 and not blobs.path(file).exists()]
    if not wanted:
        return
    blobs.folder.mkdir(parents=True, exist_ok=True)
    over = threading.Event()
    with ThreadPoolExecutor(PARALLEL) as pool:
        try:
            list(pool.map(lambda file: _Transfer(blobs, file, over).run(), wanted))
        except BaseException:  # the other threads end at their next chunk
            over.set()
            pool.shutdown(cancel_futures=True)
            raise


class _Transfer:
    """One file."""

    def __init__(self, blobs: Blobs, file: RemoteFile, over: threading.Event) -> None:
        self._blobs, self._file, self._over = blobs, file, over

    def run(self) -> None:
        path, part_path = self._blobs.path(self._file), self._blobs.part(self._file)
        with self._opened() as part:
            if path.exists():  # another process finished it while we waited for the lock
                part_path.unlink(missing_ok=True)
                return
            if part.tell() > self._file.size:  # it belongs to another file
                _empty(part)
            failures, best, last = 0, part.tell(), ""
            while not self._over.is_set():
                if part.tell() < self._file.size:  # else a killed pull left the whole file
                    last = self._try(part) or last
                if part.tell() >= self._file.size:
                    part_path.replace(path)
                    return
                failures = 0 if part.tell() > best else failures + 1
                best = max(best, part.tell())
                if failures >= TRIES:
                    raise self._gave_up(part.tell(), last)
                self._over.wait(failures * BACKOFF_S)

    def _try(self, part: IO[bytes]) -> str:
        """One request, and why it ended early, or "". Raises an error that a retry cannot fix."""
        try:
            self._request(part)
        except Exception as error:
            if _is_final(error):
                raise
            return in_words(error)
        return ""

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        """The unfinished file, open at its end, locked for this process."""
        path = self._blobs.part(self._file)
        while True:
            with path.open("ab") as part:
                fcntl.flock(part, fcntl.LOCK_EX)
                if path.exists() and path.stat().st_ino == os.fstat(part.fileno()).st_ino:
                    part.seek(0, os.SEEK_END)
                    yield part
                    return

    def _request(self, part: IO[bytes]) -> None:
        """One request from the end of the unfinished file; appends until the end or a stall."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        blobs, begin = self._blobs, part.tell()
        url = hf_hub_url(
            blobs.model, self._file.path, revision=blobs.commit, endpoint=blobs.hub.endpoint
        )
        headers = build_hf_headers(token=blobs.hub.token or False) | {"Accept-Encoding": "identity"}
        if begin:
            headers["Range"] = f"bytes={begin}-"
        session = get_session()
        with session.stream(
            "GET", url, headers=headers, timeout=blobs.stall_s, follow_redirects=True
        ) as response:
            if response.status_code == 416:  # the unfinished file does not belong to this file
                _empty(part)
                return
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            if (
                begin and response.status_code != 206
            ):  # a server without ranges sends the whole file
                _empty(part)
            for chunk in response.iter_raw():  # unbuffered: a lost connection loses its buffer
                part.write(chunk)
                part.flush()
                if self._over.is_set():
                    return

    def _gave_up(self, there: int, last: str) -> NibbleError:
        blobs, file = self._blobs, self._file
        what = (
            f"{file.path} did not grow in {TRIES} tries of up to {blobs.stall_s:g} s, at"
            f" {gib(there)} of {gib(file.size)}"
        )
        return unreachable(f"{what}: {last or 'the answer ended early'}", blobs.model, blobs.hub)


def _is_final(error: Exception) -> bool:
    """Whether another try would fail in the same way: a refusal, or a fault of this machine."""
    if isinstance(error, NibbleError) or (isinstance(error, OSError) and error.errno in _LOCAL):
        return True
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is not None and status < 500 and status not in (408, 429)


def _empty(part: IO[bytes]) -> None:
    part.truncate(0)
    part.seek(0)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
