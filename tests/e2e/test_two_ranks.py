"""Two ranks without Ray on one machine, each at another loopback address: what rank 1 proves, and
its memory.

tests/cluster has separate machines.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.canary.faults import install_faults
from tests.support.paths import CLUSTER_PLATFORM
from tests.support.servers.memory_cgroup import Hog, MemoryCgroup
from tests.support.servers.serving import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
RANK_1 = "127.0.0.2 (rank 1)"
WORDS = ["serve", "nibble-demo-nvfp4", "--max-model-len", "1024"]
TOGETHER = {
    "NIBBLE_NNODES": "2",
    "HEAD_IP": "127.0.0.1",
    "TENSOR_PARALLEL_SIZE": "2",
    "NIBBLE_CLUSTER_TOKEN": "0123456789abcdef",
    "NIBBLE_CLUSTER_WAIT_SECONDS": "60",
    "NIBBLE_KV_CACHE_BYTES": str(64 << 20),
    "NIBBLE_MEMORY_RESERVE_GIB": "0",
    "NIBBLE_ALLOW_ANONYMOUS": "1",
    "NIBBLE_CANARY": "strict",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(CLUSTER_PLATFORM),
}


class Ranks:
    """Both, started together; `more` and `before` are rank 1's, `flags` and `both` are for both."""

    def __init__(
        self,
        folder: Path,
        before: Sequence[str] = (),
        flags: Sequence[str] = (),
        both: Mapping[str, str] | None = None,
        **more: str,
    ) -> None:
        words, common = [*WORDS, *flags], TOGETHER | dict(both or {})
        self.head = Server(folder / "0", words, **common, NIBBLE_NODE_RANK="0")
        own = common | {"NIBBLE_NODE_RANK": "1", "WORKER_IP": "127.0.0.2"} | more
        self.rank1 = Server(folder / "1", words, before, **own)

    def end(self) -> None:
        self.head.end()
        self.rank1.end()


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    try:
        made = MemoryCgroup("rank1", 3400)
    except OSError as error:
        pytest.skip(f"no memory cgroup may be made here ({error})")
    yield made
    made.remove()


def test_rank_1s_workers_are_judged_by_the_head_and_its_machines_memory_by_itself(
    cgroup: MemoryCgroup, tmp_path: Path
) -> None:
    hog = Hog(cgroup)
    # Below 200 MiB it stops.
    ranks = Ranks(tmp_path, cgroup.words, NIBBLE_MEMORY_RESERVE_GIB=str(800 / 1024))
    try:
        ranks.head.wait_until_ready()
        told = ranks.head.status()
        assert told is not None
        assert [ran["node"] for ran in told["assertion"]["ran"]] == ["", RANK_1]
        assert (told["assertion"]["verdict"], told["canary"]["verdict"]) == ("passed", "passed")
        own = ranks.rank1.wait_until_ready().status()
        assert own is not None and own["memory"]["limited_by"].startswith("cgroup ")

        for _ in range(3400 // 50):
            if ranks.rank1.process.poll() is not None:
                break
            hog.take(50)
            time.sleep(0.4)
        assert ranks.rank1.wait(10) == 7
        last = ranks.rank1.err.read_text().splitlines()[-1]
        assert last.startswith("nibble: error: stopped the engine in phase headless: 0.1")
        deadline = time.monotonic() + 20
        lost = f"node {RANK_1} has left: stopped the engine in phase headless"
        while lost not in ranks.head.log():
            assert time.monotonic() < deadline, ranks.head.log()[-3000:]
            time.sleep(0.2)
    finally:
        ranks.end()
        hog.end()


def test_a_wrong_layer_of_rank_1_ends_the_heads_start_with_8_and_a_line_that_names_the_node(
    tmp_path: Path,
) -> None:
    faults: Any = install_faults(tmp_path / "faults")
    faults["PYTHONPATH"] = os.pathsep.join([faults["PYTHONPATH"], str(CLUSTER_PLATFORM)])
    ranks = Ranks(tmp_path, FAULT_AT_START="scale tensor permuted", **faults)
    try:
        assert ranks.head.wait(240) == 8
        last = ranks.head.err.read_text().splitlines()[-1]
        assert "the canary failed: layers: " in last and f"node {RANK_1}: rank 1, " in last
    finally:
        ranks.end()
