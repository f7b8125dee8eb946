"""Two servers started at the same moment on one machine, nothing shared but its hardware: both get
ready and answer.

On a GPU: `TWO_STARTS_ROUNDS=5 python -m pytest --slow tests/e2e/test_two_starts.py`; each round
begins with empty caches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.servers.serving import Server

ROUNDS = int(os.environ.get("TWO_STARTS_ROUNDS", "1"))
QUESTION = {"model": "default", "prompt": "Hello", "max_tokens": 8, "temperature": 0}
SETTINGS = (("--max-model-len", "1024"), ("--max-model-len", "512", "--max-num-seqs", "4"))

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def start(folder: Path, words: tuple[str, ...]) -> Server:
    """A server with every folder of its user empty."""
    home = folder / "home"
    home.mkdir(parents=True)
    caches = {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "VLLM_CACHE_ROOT": str(home / "vllm"),
        "TMPDIR": str(folder),
        # Bytes, because each would otherwise see the other's memory come and go in its profile.
        "NIBBLE_KV_CACHE_BYTES": str(256 << 20),
        "GPU_MEMORY_UTIL": "0.2",
    }
    return Server(folder / "server", ["serve", "nibble-demo-nvfp4", *words], **caches)


@pytest.fixture(params=range(ROUNDS))
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(start, (tmp_path / "first", tmp_path / "second"), SETTINGS))
    yield made
    for server in made:
        server.end()


def test_two_servers_started_at_the_same_moment_from_empty_caches_both_answer(
    servers: list[Server],
) -> None:
    with ThreadPoolExecutor(2) as pool:
        for server in pool.map(Server.wait_until_ready, servers):
            assert any("ready" in line for line in server.said())
        answers = list(pool.map(lambda server: server.ask("/v1/completions", QUESTION), servers))
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0][1]["choices"][0]["text"] == answers[1][1]["choices"][0]["text"]
