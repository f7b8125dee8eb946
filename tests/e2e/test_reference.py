"""Computed references with real servers: made by a start, used by the next, and a model that
computes something else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.canary.faults import install_faults
from tests.support.servers.serving import Server, clean_environ

pytestmark = pytest.mark.vllm
DEMO = "nibble-demo-nvfp4"
FLAGS = ("--enforce-eager", "--max-model-len", "512")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A start without references that makes one; ended again, its cache is kept."""
    folder = tmp_path_factory.mktemp("first")
    server = Server(
        folder, ["serve", DEMO, *FLAGS], NIBBLE_CANARY="strict", NIBBLE_REFERENCE="auto"
    )
    try:
        server.wait_until_ready()
        (folder / "status.json").write_text(json.dumps(server.status()))
    finally:
        server.end()
    return server


def findings(server: Server) -> dict[str, dict[str, str]]:
    status = json.loads((server.err.parent / "status.json").read_text())
    return {one["mechanism"]: one for one in status["canary"]["findings"]}


def test_a_start_computes_a_reference_and_a_healthy_server_agrees_with_it(first: Server) -> None:
    said = "\n".join(first.said())
    assert "computing a reference of" in said and "the reference was computed in" in said
    found = findings(first)["computed"]
    assert found["verdict"] == "passed", found
    assert "4 layers on 192 tokens" in found["detail"] and "6 prompts of" in found["detail"]


@pytest.mark.slow  # tests/unit/test_canary_computed.py names layers
def test_the_next_start_uses_it_and_a_wrong_model_ends_it_by_the_layer(
    first: Server, tmp_path: Path
) -> None:
    """Each product is right, so that `layers` passes: what layer 1's MLP returns is made
    smaller.
    """
    server = Server(
        tmp_path / "server",
        ["serve", DEMO, *FLAGS],
        NIBBLE_CANARY="strict",
        NIBBLE_REFERENCE="auto",
        NIBBLE_CACHE_DIR=first.environ["NIBBLE_CACHE_DIR"],
        FAULT_AT_START="an MLP's output times 0.9",
        **install_faults(tmp_path / "faults"),
    )
    try:
        code = server.wait(240)
    finally:
        server.end()
    line = server.err.read_text().strip().splitlines()[-1]
    assert code == 8, line
    assert "the canary failed: computed: layer 1 is the first wrong one" in line
    assert "computing a reference" not in "\n".join(server.said())


@pytest.mark.slow
def test_the_verb_writes_what_it_says(tmp_path: Path) -> None:
    out = tmp_path / "reference.json"
    words = [
        sys.executable,
        "-m",
        "nibble",
        "reference",
        DEMO,
        "--json",
        "--out",
        str(out),
        "--activations",
        "bf16",
    ]
    done = subprocess.run(
        words, env=clean_environ(tmp_path), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["out"], told["activations"], told["layers"]) == (str(out), "bf16", 4)
    data = json.loads(out.read_text())
    assert len(data["cases"]) == 6 and len(data["norms"]) == 4
    assert os.path.exists(out.with_name(data["layer_file"]))
