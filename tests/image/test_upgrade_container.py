"""`nibble upgrade --check` beside the server of a container, as a user runs it.

The tree is the image's own vLLM: CI downloads no other release.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.docker.containers import HARDENED, Container, running, volume

pytestmark = [pytest.mark.docker, pytest.mark.slow]
PACKAGES = "/opt/venv/lib/python3.11/site-packages"


@pytest.fixture(scope="module")
def server(cpu_image: str) -> Iterator[Container]:
    """A read-only container, of which only the volume and /tmp can be written."""
    with volume() as cache:
        options = [*HARDENED, "--volume", f"{cache}:/var/cache/nibble"]
        with running(cpu_image, "serve", "nibble-demo-nvfp4", options=options) as container:
            container.wait_healthy()
            yield container


def test_it_compares_the_plan_of_the_server_that_runs(server: Container) -> None:
    done = server.exec("nibble", "upgrade", "--check", "--tree", PACKAGES, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [one["model"] for one in found["models"]] == ["nibble-demo-nvfp4"]
    assert found["models"][0]["refusals"] == [] and found["recipes"] == []
    assert found["newer"] == found["installed"] and found["in_the_way"] == 0
    assert {line["word"] for line in found["patches"]} <= {"applied", "not applicable"}
    assert server.health() == "healthy"


def test_a_release_that_no_index_has_is_one_line(server: Container) -> None:
    done = server.exec("nibble", "upgrade", "--check", "--to", "0.32.99")
    assert done.returncode == 6
    error = done.stderr.splitlines()[-1]
    assert error.startswith("nibble: error: vllm==0.32.99 cannot be downloaded: ")
    assert "Traceback" not in done.stderr and "--tree" in error
    left = server.exec("sh", "-c", "ls -d /var/cache/nibble/upgrade-* /tmp/upgrade-*")
    assert left.stdout == ""
