"""`nibble pull --dry-run`, the bars, and the revision a pull tells."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nibble.errors import ExitCode, NibbleError
from nibble.hub.dry_run import plan_pull
from nibble.hub.pull import pull
from nibble.machine.paths import demo_models
from tests.support.paths import ROOT
from tests.support.servers.hub import GOOD_TOKEN, OTHER_TOKEN, Hub

SIZE = 300_000


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(os.urandom(SIZE))
    (folder / "photo.png").write_bytes(b"not needed")
    with Hub() as server:
        server.add("acme/demo", folder)
        server.add("acme/gated", folder, gated=True)
        server.add("acme/huge", folder, huge={"model-2.safetensors": 1 << 50})
        yield server


def test_a_dry_run_resolves_the_revision_adds_up_the_sizes_and_fetches_nothing(
    hub: Hub, environ
) -> None:
    plan = plan_pull("acme/demo", None, environ)
    assert (plan.revision, plan.is_pinned) == (hub.repos["acme/demo"].sha, False)
    assert (plan.files, plan.total_bytes, plan.fetch_bytes) == (2, SIZE + 2, SIZE + 2)
    assert plan.fits and plan.free_bytes > 0
    assert not hub.ranges and not list(Path(environ["HF_HOME"]).rglob("*.safetensors"))
    assert f"pin it with NIBBLE_REVISION={plan.revision}" in "\n".join(plan.lines())


def test_what_is_here_already_is_not_counted_again(hub: Hub, environ) -> None:
    sha = hub.repos["acme/demo"].sha
    part = Path(environ["HF_HOME"]) / "hub/models--acme--demo/blobs"
    part.mkdir(parents=True)
    digest = hub.repos["acme/demo"].entries["model.safetensors"].sha256
    (part / f"{digest}.nibble.incomplete").write_bytes(b"x" * 1000)
    assert plan_pull("acme/demo", sha, environ).fetch_bytes == SIZE + 2 - 1000
    (part / f"{digest}.nibble.incomplete").unlink()
    pull("acme/demo", None, environ)
    plan = plan_pull("acme/demo", sha, environ)
    assert (plan.fetch_bytes, plan.is_pinned) == (0, True)
    offline = plan_pull("acme/demo", None, environ | {"HF_HUB_OFFLINE": "1"})
    assert (offline.fetch_bytes, offline.revision, offline.access) == (
        0,
        sha,
        "offline: not checked",
    )


@pytest.mark.parametrize("token", [None, OTHER_TOKEN])
def test_a_gated_model_without_access_is_refused_before_anything_is_fetched(
    hub: Hub, environ, token
) -> None:
    given = environ | ({"HF_TOKEN": token} if token else {})
    with pytest.raises(NibbleError) as caught:
        plan_pull("acme/gated", None, given)
    assert caught.value.code is ExitCode.MODEL and "gated" in caught.value.line()
    assert (
        "granted to this HF_TOKEN"
        in plan_pull("acme/gated", None, environ | {"HF_TOKEN": GOOD_TOKEN}).access
    )


def test_a_folder_needs_no_pull_and_a_dry_run_of_it_says_so(
    hub: Hub, environ, tmp_path: Path
) -> None:
    with pytest.raises(NibbleError) as caught:
        plan_pull(str(tmp_path / "model"), None, environ)
    assert caught.value.code is ExitCode.USAGE and not hub.requests


def nibble(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "NIBBLE_", "VLLM_"))}
    command = [sys.executable, "-m", "nibble", *words]
    return subprocess.run(
        command,
        env=clean | environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_dry_run_of_what_does_not_fit_exits_7_after_the_figures(environ) -> None:
    done = nibble(environ, "pull", "acme/huge", "--dry-run")
    assert done.returncode == 7 and "too little" in done.stdout and "nibble: error:" in done.stderr
    fits = nibble(environ, "pull", "acme/demo", "--dry-run", "--json")
    assert fits.returncode == 0 and json.loads(fits.stdout)["fits"] is True


@pytest.mark.parametrize("words", [(), ("--dry-run",)], ids=["pull", "dry run"])
def test_a_demo_comes_with_nibble_and_nobody_is_asked_for_it(
    hub: Hub, environ, words: tuple[str, ...]
) -> None:
    done = nibble(environ, "pull", "nibble-demo-nvfp4", *words)
    assert done.returncode == 0 and done.stdout.strip() == str(demo_models()["nibble-demo-nvfp4"])
    assert "nibble-demo-nvfp4 comes with nibble" in done.stderr and not hub.requests


def test_a_pull_shows_the_commit_it_took_and_how_to_pin_it(hub: Hub, environ) -> None:
    done = nibble(environ, "pull", "acme/demo")
    assert done.returncode == 0 and Path(done.stdout.strip()).name == hub.repos["acme/demo"].sha
    assert f"NIBBLE_REVISION={hub.repos['acme/demo'].sha}" in done.stderr
    assert "[nibble] download: 0.3 MiB of 0.3 MiB" in done.stderr


def test_on_a_terminal_a_pull_draws_bars(environ) -> None:
    ours, theirs = pty.openpty()
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "NIBBLE_", "VLLM_"))}
    done = subprocess.run(
        [sys.executable, "-m", "nibble", "pull", "acme/demo"],
        env=clean | environ | {"TERM": "xterm", "COLUMNS": "100"},
        cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, check=False, timeout=60,
    )  # fmt: skip
    os.close(theirs)
    drawn = os.read(ours, 1 << 20).decode()
    os.close(ours)
    assert done.returncode == 0 and "━" in drawn and "verify" in drawn
