"""Compiled code of a real server: kept for the next start, and dropped and made again where it is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import Server

from nibble.cache_entries import damage, entries


def compiled(folder: Path) -> list[Path]:
    """What torch.compile left in the graphs entry."""
    return sorted(folder.glob("nibble/engine/graphs-*/vllm/torch_compile_cache/**/*.so"))


def start(folder: Path) -> Server:
    server = Server(folder, ["serve", "nibble-demo", "--no-enforce-eager"], VLLM_CACHE_ROOT="")
    try:
        server.wait_until_ready()
        server.signal()
        assert server.wait(60) == 0
    finally:
        server.end()
    return server


@pytest.mark.slow
def test_compiled_code_is_recorded_and_a_truncated_file_costs_a_compilation_not_the_start(
    tmp_path: Path,
) -> None:
    start(tmp_path)
    made = compiled(tmp_path)
    assert made
    found = entries(tmp_path / "nibble" / "engine")
    assert all(entry.is_recorded and not entry.is_used and not list(damage(entry.folder)) for entry in found)

    made[0].write_bytes(made[0].read_bytes()[:1000])
    said = "\n".join(start(tmp_path).said())
    assert "1000 bytes instead of" in said and "this start compiles it again" in said
    assert made[0].stat().st_size > 1000
    assert not [
        problem for entry in entries(tmp_path / "nibble" / "engine") for problem in damage(entry.folder)
    ]
