"""Downloads a model completely and verifies it before vLLM starts: disk check, download, sha256.

vLLM then reads the folder with HF_HUB_OFFLINE=1. Give it the returned folder, not the id: nibble
skips files that vLLM does not load, and huggingface_hub 2.4 calls an offline snapshot without them
incomplete (_snapshot_download.py:447).
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nibble.errors import ExitCode, NibbleError
from nibble.hub.access import (
    Access,
    access,
    hub_error,
    in_words,
    is_model_id,
    not_an_id,
    not_cached,
    unreachable,
)
from nibble.hub.files import (
    COMMIT,
    RemoteFile,
    cached_snapshot,
    corruption,
    remove_blob,
    select,
    storage_folder,
    unverified,
    unverified_record,
)
from nibble.hub.progress import PROGRESS_SECONDS, OnProgress, Progress, Stage
from nibble.hub.transfer import STALL_VARIABLE, Blobs, fetch_blobs
from nibble.machine.disk import (
    free_bytes,
    gib,
    is_folder,
    not_readable,
    not_writable,
    unreadable_file,
    write_problem,
)
from nibble.settings.options import default_of

# Space that stays free on the cache's file system for compile caches and logs
MARGIN_BYTES = 1 << 30


@dataclass(frozen=True)
class PullResult:
    """The model's folder and commit (None for a given folder); `bytes` counts this download."""

    path: Path
    revision: str | None
    bytes: int
    seconds: float
    notices: tuple[str, ...] = ()


def pull(
    model: str,
    revision: str | None,
    environ: Mapping[str, str],
    on_progress: OnProgress | None = None,
    load_format: str = "auto",
) -> PullResult:
    """Make `model` (an id, or a folder, which is returned unchanged) complete on this disk.

    `load_format` is vLLM's flag; it selects Mistral's or Hugging Face's copy of the weights. Raises
    NibbleError: 4 unknown, gated, offline, network, corrupt or unreadable; 5 cache not writable; 7
    disk too small.
    """
    started = time.monotonic()
    if is_folder(folder := Path(os.path.expanduser(model))):
        if blocked := unreadable_file(folder):
            raise not_readable(blocked)
        return PullResult(folder, None, 0, time.monotonic() - started)
    if not is_model_id(model):
        raise not_an_id(model)
    hub = access(environ)
    cached = cached_snapshot(model, revision, hub.cache, load_format)
    if cached and (hub.offline or COMMIT.fullmatch(revision or "")):
        return PullResult(cached, cached.name, 0, time.monotonic() - started)
    if hub.offline:
        raise not_cached(model, hub)
    try:
        commit, files = list_files(model, revision, hub)
    except NibbleError as error:
        if cached is None or not error.__cause__ or not _is_outage(error.__cause__):
            raise
        notice = (
            f"{hub.address} does not answer; nibble uses {model} at {cached.name} from the cache"
        )
        return PullResult(cached, cached.name, 0, time.monotonic() - started, (notice,))
    if current := cached_snapshot(model, commit, hub.cache, load_format):
        return PullResult(current, commit, 0, time.monotonic() - started)
    return _download(
        Pull(
            model,
            revision,
            commit,
            select(files, load_format),
            hub,
            on_progress,
            stall_seconds(environ),
        ),
        cached,
        started,
    )


def stall_seconds(environ: Mapping[str, str]) -> float:
    """NIBBLE_DOWNLOAD_STALL_SECONDS; settings/options.py has checked its limits."""
    return float(environ.get(STALL_VARIABLE) or default_of("download_stall_seconds"))


@dataclass(frozen=True)
class Pull:
    """One download: the files wanted at a commit."""

    model: str
    revision: str | None
    commit: str
    files: tuple[RemoteFile, ...]
    hub: Access
    on_progress: OnProgress | None
    stall_s: float = default_of("download_stall_seconds")

    @property
    def blobs(self) -> Blobs:
        return Blobs(self.model, self.commit, self.hub, self.storage / "blobs", self.stall_s)

    @property
    def storage(self) -> Path:
        return storage_folder(self.hub.cache, self.model)

    @property
    def snapshot(self) -> Path:
        return self.storage / "snapshots" / self.commit

    def report(self, stage: Stage, done: int, total: int) -> None:
        if self.on_progress:
            self.on_progress(Progress(stage, min(done, total), total))


def list_files(model: str, revision: str | None, hub: Access) -> tuple[str, list[RemoteFile]]:
    """The commit that `revision` (None: main) is now, and its files. One request."""
    from huggingface_hub import HfApi

    try:
        with _quiet():
            info = HfApi(endpoint=hub.endpoint, token=hub.token).model_info(
                model, revision=revision, files_metadata=True, timeout=20
            )
    except Exception as error:
        raise hub_error(error, model, revision, hub) from error
    assert info.sha is not None
    return info.sha, [
        RemoteFile(
            file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else None, file.blob_id
        )
        for file in info.siblings or ()
    ]


def _is_outage(error: BaseException) -> bool:
    """Whether the Hub did not answer, in contrast to a refusal."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is None or status >= 500 or status == 429


def _download(job: Pull, older: Path | None, started: float) -> PullResult:
    """Check disk and permissions, fetch what is missing, verify what was fetched."""
    if problem := write_problem(job.storage):
        if older is None:
            raise not_writable(job.hub.cache, problem, "HF_HOME")
        notice = (
            f"cannot write to {job.hub.cache} ({problem}); nibble uses the older {job.model} at"
            f" {older.name}"
        )
        return PullResult(older, older.name, 0, time.monotonic() - started, (notice,))
    fetch_bytes = _preflight(job)
    pending = unverified(job.storage, job.commit) | _absent(job)
    _note_unverified(job, pending)
    _fetch(job, fetch_bytes)
    _verify(job, pending)
    _note_unverified(job, set())
    if blocked := unreadable_file(job.snapshot):
        raise not_readable(blocked)
    return PullResult(job.snapshot, job.commit, fetch_bytes, time.monotonic() - started)


def _preflight(job: Pull) -> int:
    """Bytes to fetch. Raises NO_FIT unless they and a margin fit on the cache's file system."""
    fetch_bytes = missing_bytes(job)
    check_disk(job.model, fetch_bytes, free_bytes(job.hub.cache), job.hub.cache)
    return fetch_bytes


def missing_bytes(job: Pull) -> int:
    """Bytes that the cache lacks, less what an interrupted pull left.

    It requests every file's header from the Hub, as a download does.
    """
    try:
        plan = _snapshot(job, dry_run=True)
    except Exception as error:
        raise hub_error(error, job.model, job.revision, job.hub) from error
    sizes = {file.path: file.size for file in job.files}
    fetch_bytes = sum(
        entry.file_size or sizes[entry.filename] for entry in plan if entry.will_download
    )
    return fetch_bytes - job.blobs.present_bytes(job.files)


def _snapshot(job: Pull, dry_run: bool = False) -> Any:
    """huggingface_hub's download of the job's files; with `dry_run` only its list of them."""
    from huggingface_hub import snapshot_download

    with _quiet():
        return snapshot_download(
            job.model,
            revision=job.commit,
            cache_dir=job.hub.cache,
            endpoint=job.hub.endpoint,
            token=job.hub.token,
            allow_patterns=_literal_patterns(job.files),
            dry_run=dry_run,
        )


def check_disk(
    model: str, fetch_bytes: int, available_bytes: int, cache: Path, variable: str = "HF_HOME"
) -> None:
    """Raise NO_FIT unless `fetch_bytes` and the margin fit; `variable` moves `cache` elsewhere."""
    needed = fetch_bytes + MARGIN_BYTES
    if fetch_bytes and needed > available_bytes:
        what = (
            f"the download of {model} needs {gib(fetch_bytes)} and a margin of {gib(MARGIN_BYTES)};"
            f" {cache} has {gib(available_bytes)} free, {gib(needed - available_bytes)} too little"
        )
        raise NibbleError(
            ExitCode.NO_FIT, what=what, action=f"free space or move the cache with {variable}"
        )


def _literal_patterns(files: Iterable[RemoteFile]) -> list[str]:
    """Paths as fnmatch patterns that match only themselves."""
    return [re.sub(r"([*?\[])", r"[\1]", file.path) for file in files]


def _absent(job: Pull) -> set[str]:
    return {file.path for file in job.files if not (job.snapshot / file.path).exists()}


def _note_unverified(job: Pull, paths: set[str]) -> None:
    record = unverified_record(job.storage, job.commit)
    if paths:
        record.write_text(json.dumps(sorted(paths)))
    else:
        record.unlink(missing_ok=True)


def _fetch(job: Pull, fetch_bytes: int) -> None:
    """Download all files of the job; the error names what is missing. Finished files stay."""
    try:
        with _watch(job, fetch_bytes):
            fetch_blobs(job.blobs, job.files)
            _snapshot(job)
    except NibbleError:
        raise
    except Exception as error:
        mapped = hub_error(error, job.model, job.revision, job.hub)
        missing = sorted(_absent(job))
        if mapped.code is ExitCode.MODEL and missing:
            done = len(job.files) - len(missing)
            what = f"{missing[0]} failed after {done} of {len(job.files)} files: {in_words(error)}"
            mapped = unreachable(what, job.model, job.hub)
        raise mapped from error
    if job.revision != job.commit:
        _write_ref(job)


def _write_ref(job: Pull) -> None:
    """Write refs/main or the branch for offline starts; a download by commit does not write it."""
    ref = job.storage / "refs" / (job.revision or "main")
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(job.commit)


@contextmanager
def _watch(job: Pull, fetch_bytes: int) -> Iterator[None]:
    """Report progress by the growth of the blobs folder, for any transport (HTTP, Xet)."""
    if job.on_progress is None:
        yield
        return
    blobs, done = job.storage / "blobs", threading.Event()
    before = _blob_bytes(blobs)

    def poll() -> None:
        while not done.wait(PROGRESS_SECONDS):
            job.report("download", _blob_bytes(blobs) - before, fetch_bytes)

    thread = threading.Thread(target=poll, name="pull-progress", daemon=True)
    thread.start()
    try:
        yield
        job.report("download", fetch_bytes, fetch_bytes)
    finally:
        done.set()
        thread.join()


def _blob_bytes(blobs: Path) -> int:
    """Bytes written into `blobs`; of a file allocated ahead only the written part."""
    total = 0
    for path in blobs.glob("*"):
        try:
            info = path.stat()
        except OSError:  # a temporary file that was just renamed
            continue
        total += (
            min(info.st_size, info.st_blocks * 512)
            if path.suffix == ".incomplete"
            else info.st_size
        )
    return total


def _verify(job: Pull, pending: set[str]) -> None:
    """Hash `pending` files against the Hub's listing; remove and name those that differ."""
    files = [file for file in job.files if file.path in pending]
    total, done, lock = sum(file.size for file in files), 0, threading.Lock()

    def count(amount: int) -> None:
        nonlocal done
        with lock:
            done += amount
            now = done
        job.report("verify", now, total)

    with ThreadPoolExecutor(4) as pool:  # hashlib releases the GIL
        problems = list(
            pool.map(lambda file: corruption(job.snapshot / file.path, file, count), files)
        )
    bad = [(file, problem) for file, problem in zip(files, problems, strict=True) if problem]
    if not bad:
        return
    for file, _ in bad:
        remove_blob(job.snapshot / file.path)
    names = ", ".join(f"{file.path} ({problem})" for file, problem in bad[:3])
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    what = f"downloaded files of {job.model} are corrupt: {names}{more}"
    raise NibbleError(
        ExitCode.MODEL,
        what=what,
        action="run it again to fetch them again: nibble removed them from the cache",
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence huggingface_hub's bars and retry warnings: nibble prints progress and errors."""
    from huggingface_hub.utils import disable_progress_bars, logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
