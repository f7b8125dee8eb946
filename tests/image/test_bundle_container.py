"""A bundle with the real image, served from its folder without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.docker import containers
from tests.support.paths import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.slow]
QUESTION = "What is the capital of France?"
READY_LIMIT_S = 240


def test_a_bundle_serves_on_a_machine_without_a_network(cpu_image: str, tmp_path: Path) -> None:
    """The folder is all that the server reads: a model under another name, no network."""
    model, to, name = tmp_path / "my-model", tmp_path / "bundle", f"nibble-bundle-{os.getpid()}"
    shutil.copytree(ROOT / "models/nibble-demo-nvfp4", model)
    environ = os.environ | {"DOCKER": containers.client() or "docker"}
    words = ["bundle", str(model), str(to), "--image", cpu_image, "--json"]
    made = subprocess.run(
        [sys.executable, "-m", "nibble", *words],
        env=environ, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    assert json.loads(made.stdout)["image"]["name"] == cpu_image
    assert "\ntorch\t" in (to / "licences/packages.tsv").read_text()
    subprocess.run([to / "install.sh"], env=environ, check=True, timeout=300)
    options = ["--network", "none", "--name", name, "--env", "NIBBLE_REFERENCE=off"]
    server = subprocess.Popen([to / "serve.sh", *options], env=environ)
    try:
        end = time.monotonic() + READY_LIMIT_S
        ask = ("exec", name, "nibble", "chat", QUESTION)
        while (asked := containers.docker(*ask, check=False)).returncode:
            assert time.monotonic() < end and server.poll() is None, asked.stderr
            time.sleep(1)
        answer = asked.stdout
        assert "Paris" in answer
    finally:
        containers.docker("stop", name, check=False)
        assert server.wait(90) == 0
