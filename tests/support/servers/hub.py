"""A local server that speaks as much of the Hugging Face Hub as huggingface_hub 2.4 asks of it.

Point HF_ENDPOINT at it. It serves local folders as model repositories, with the Hub's own error
forms (what `hf_raise_for_status` looks for) and with faults on request. No Xet: plain HTTP.

    with Hub() as hub:
        hub.add("acme/demo", folder)
        ... HF_ENDPOINT=hub.url ...

or from a shell: `python -m tests.support.servers.hub PORT FOLDER [REPO_ID]`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

GOOD_TOKEN = "hf_fixture_member_of_every_gate"
OTHER_TOKEN = "hf_fixture_valid_but_on_no_list"
LFS_SUFFIXES = (".safetensors", ".bin", ".pth", ".gguf", ".onnx", ".pt")
LFS_BYTES = 10 << 20  # the Hub keeps larger files in LFS whatever their name
CHUNK = 64 << 10

# corrupt: right length, one wrong byte in each chunk. short: fewer bytes, honestly declared. cut:
# each answer ends half-way. slow: 64 KiB each 0.2 s. unavailable: 503. hang: never answers. stall:
# nothing comes after the first 100,000 bytes. no-ranges: the whole file whatever is asked for.
Fault = Literal["corrupt", "short", "cut", "slow", "unavailable", "hang", "stall", "no-ranges"]
STALL_BYTES = 100_000


@dataclass
class Entry:
    """One file of a repository. `source` is None for a huge file that exists only in listings."""

    path: str
    size: int
    blob_id: str
    sha256: str | None
    source: Path | None

    @property
    def etag(self) -> str:
        return self.sha256 or self.blob_id

    def tree_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "type": "file",
            "oid": self.blob_id,
            "size": self.size,
            "path": self.path,
        }
        if self.sha256:
            data["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": 134}
        return data

    def sibling_json(self, with_blobs: bool) -> dict[str, Any]:
        if not with_blobs:
            return {"rfilename": self.path}
        lfs = (
            {"lfs": {"sha256": self.sha256, "size": self.size, "pointerSize": 134}}
            if self.sha256
            else {}
        )
        return {"rfilename": self.path, "size": self.size, "blobId": self.blob_id, **lfs}


@dataclass
class Repo:
    """A repository: files, who may read it, and what goes wrong with which file."""

    id: str
    entries: dict[str, Entry]
    sha: str
    gated: bool = False
    private: bool = False
    faults: dict[str, Fault] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)


def read_entries(folder: Path) -> dict[str, Entry]:
    """Every file under `folder` with the ids git and LFS would give it."""
    entries: dict[str, Entry] = {}
    for source in sorted(
        path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts
    ):
        content = source.read_bytes()
        path = source.relative_to(folder).as_posix()
        blob_id = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        is_lfs = path.endswith(LFS_SUFFIXES) or len(content) > LFS_BYTES
        sha256 = hashlib.sha256(content).hexdigest() if is_lfs else None
        entries[path] = Entry(path, len(content), blob_id, sha256, source)
    return entries


class Hub:
    """The server. `requests` records (method, path) of all asked, `ranges` (path, Range header) of
    files fetched; `outage` makes every answer a 503.
    """

    def __init__(self, port: int = 0) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str]] = []
        self.ranges: list[tuple[str, str]] = []
        self.outage = False
        self.stopping = threading.Event()
        hub = self

        class Bound(_Handler):
            server_hub = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Bound)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def add(
        self,
        repo_id: str,
        folder: Path,
        *,
        gated: bool = False,
        private: bool = False,
        faults: dict[str, Fault] | None = None,
        huge: dict[str, int] | None = None,
    ) -> Repo:
        """Serve `folder` as `repo_id`. `huge` adds files of a declared size that cannot be
        downloaded.
        """
        entries = read_entries(folder)
        for path, size in (huge or {}).items():
            name = f"{path}:{size}".encode()
            entries[path] = Entry(
                path, size, hashlib.sha1(name).hexdigest(), hashlib.sha256(name).hexdigest(), None
            )
        listing = json.dumps([repo_id, *(entry.tree_json() for entry in entries.values())])
        sha = hashlib.sha1(listing.encode()).hexdigest()
        repo = Repo(
            repo_id, entries, sha, gated, private, dict(faults or {}), {"main": sha, "v1": sha}
        )
        self.repos[repo_id] = repo
        return repo

    def downloads(self) -> list[str]:
        """Paths of the files fetched so far, in order."""
        return [path for method, path in self.requests if method == "GET" and "/resolve/" in path]

    def __enter__(self) -> Hub:
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.server.shutdown()
        self.server.server_close()


class _Refusal(Exception):
    """An answer in the Hub's error form."""

    def __init__(
        self, status: int, code: str | None, message: str, headers: dict[str, str] | None = None
    ) -> None:
        self.status, self.code, self.message, self.headers = status, code, message, headers or {}
        super().__init__(message)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: Hub

    def log_message(self, format: str, *args: Any) -> None:  # quiet: tests read `Hub.requests`
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        if self.server_hub.stopping.is_set():  # a kept-alive connection must not outlive the server
            self.close_connection = True
            return
        url = urlsplit(self.path)
        self.server_hub.requests.append((self.command, unquote(url.path)))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        try:
            if self.server_hub.outage:
                raise _Refusal(503, None, "Service Unavailable")
            self._route(unquote(url.path), parse_qs(url.query), body)
        except _Refusal as refusal:
            self._refuse(refusal)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _route(self, path: str, query: dict[str, list[str]], body: str) -> None:
        if path == "/":
            return self._json({})
        if path == "/api/whoami-v2":
            return self._whoami()
        if match := re.fullmatch(
            r"/api/models/(.+?)(?:/(revision|tree|paths-info|refs)(?:/(.*))?)?", path
        ):
            repo = self._repo(match[1])
            return self._api(repo, match[2] or "revision", match[3] or "", query, body)
        if match := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
            return self._resolve(self._repo(match[1]), match[2], match[3])
        raise _Refusal(404, None, "Not Found")

    def _token(self) -> str | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ").strip() or None
        if token not in (None, GOOD_TOKEN, OTHER_TOKEN):
            raise _Refusal(401, None, "Invalid credentials in Authorization header")
        return token

    def _whoami(self) -> None:
        if self._token() is None:
            raise _Refusal(401, None, "Invalid username or password.")
        self._json({"type": "user", "name": "fixture", "auth": {}})

    def _repo(self, repo_id: str) -> Repo:
        token = self._token()
        repo = self.server_hub.repos.get(repo_id)
        if repo is None or (repo.private and token != GOOD_TOKEN):
            if token is None:  # the Hub does not tell strangers whether a repository exists
                raise _Refusal(401, None, "Invalid username or password.")
            raise _Refusal(404, "RepoNotFound", "Repository not found")
        return repo

    def _commit(self, repo: Repo, revision: str) -> str:
        sha = repo.refs.get(revision, revision)
        if sha != repo.sha:
            raise _Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    def _api(
        self, repo: Repo, verb: str, rest: str, query: dict[str, list[str]], body: str
    ) -> None:
        if verb == "refs":
            branch = {"name": "main", "ref": "refs/heads/main", "targetCommit": repo.sha}
            return self._json({"branches": [branch], "tags": [], "converts": []})
        # A gated repository's metadata is public, as on the Hub; only its files are not.
        sha = self._commit(repo, rest.split("/")[0] or "main")
        if verb == "tree":
            return self._json([entry.tree_json() for entry in repo.entries.values()])
        if verb == "paths-info":
            wanted = _paths_of(body)
            return self._json(
                [repo.entries[path].tree_json() for path in wanted if path in repo.entries]
            )
        siblings = [entry.sibling_json("blobs" in query) for entry in repo.entries.values()]
        model = {
            "id": repo.id,
            "modelId": repo.id,
            "sha": sha,
            "private": repo.private,
            "tags": [],
            "downloads": 0,
        }
        self._json(model | {"gated": "manual" if repo.gated else False, "siblings": siblings})

    def _resolve(self, repo: Repo, revision: str, path: str) -> None:
        sha = self._commit(repo, revision)
        entry = repo.entries.get(path)
        if entry is None:
            raise _Refusal(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": sha})
        if repo.gated and self._token() != GOOD_TOKEN:
            known = self._token() is not None
            message = f"Access to model {repo.id} is restricted" + (
                "." if known else ". Please log in."
            )
            raise _Refusal(403 if known else 401, "GatedRepo", message)
        fault = repo.faults.get(path)
        if self.command == "GET":
            self.server_hub.ranges.append((path, self.headers.get("Range") or ""))
        if fault == "unavailable" or (entry.source is None and self.command == "GET"):
            raise _Refusal(503, None, "Service Unavailable")
        if fault == "hang":
            self.server_hub.stopping.wait(60)
            self.close_connection = True
            return
        self._file(sha, entry, fault if self.command == "GET" or fault == "short" else None)

    def _file(self, sha: str, entry: Entry, fault: Fault | None) -> None:
        size = entry.size // 2 if fault == "short" else entry.size
        wanted = None if fault == "no-ranges" else self.headers.get("Range")
        start, end = _byte_range(wanted, size)
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{entry.etag}"')
        self.send_header("X-Repo-Commit", sha)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(end - start))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.end_headers()
        if self.command == "HEAD":
            return
        stop = (
            start + (end - start + 1) // 2
            if fault == "cut"
            else min(end, STALL_BYTES)
            if fault == "stall"
            else end
        )
        for chunk in _chunks(entry, start, stop):
            if fault == "slow" and self.server_hub.stopping.wait(0.2):
                break
            self.wfile.write(
                chunk[:-1] + bytes([chunk[-1] ^ 0xFF]) if fault == "corrupt" else chunk
            )
        if fault == "stall":
            self.wfile.flush()
            self.server_hub.stopping.wait(60)
        self.close_connection = self.close_connection or fault in ("cut", "stall")

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, refusal: _Refusal) -> None:
        body = json.dumps({"error": refusal.message}).encode()
        self.send_response(refusal.status)
        if refusal.code:
            self.send_header("X-Error-Code", refusal.code)
        self.send_header("X-Error-Message", refusal.message)
        for name, value in refusal.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _paths_of(body: str) -> list[str]:
    """The `paths` of a paths-info request, form-encoded (huggingface_hub) or JSON (others)."""
    if body.lstrip().startswith("{"):
        return list(json.loads(body).get("paths", []))
    return parse_qs(body).get("paths", [])


def _byte_range(header: str | None, size: int) -> tuple[int, int]:
    """Half-open byte range of a Range header, clipped to `size`."""
    if not header:
        return 0, size
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header.strip())
    if match is None or (not match[1] and not match[2]):
        raise _Refusal(416, None, "Range Not Satisfiable", {"Content-Range": f"bytes */{size}"})
    if not match[1]:
        return max(0, size - int(match[2])), size
    start, end = int(match[1]), min(size, int(match[2]) + 1 if match[2] else size)
    if start >= size:
        raise _Refusal(416, None, "Range Not Satisfiable", {"Content-Range": f"bytes */{size}"})
    return start, end


def _chunks(entry: Entry, start: int, stop: int) -> Iterator[bytes]:
    assert entry.source is not None
    with entry.source.open("rb") as file:
        file.seek(start)
        while start < stop and (chunk := file.read(min(CHUNK, stop - start))):
            yield chunk
            start += len(chunk)


def main() -> None:
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    repo_id = sys.argv[3] if len(sys.argv) > 3 else "acme/demo"
    with Hub(port) as hub:
        repo = hub.add(repo_id, folder)
        print(f"HF_ENDPOINT={hub.url}  {repo.id}@{repo.sha}", flush=True)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main()
