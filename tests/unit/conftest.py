"""A local Hugging Face Hub with the environment of its client, and the machine that a plan is for.

A file with other needs overrides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nibble.machine.hardware import Hardware
from nibble.plan import gather
from tests.support.hardware import B200, HOPPER, SM120
from tests.support.servers.hub import Hub
from tests.support.tried_machine import Machine


@pytest.fixture
def hub() -> Iterator[Hub]:
    """Without a repository."""
    with Hub() as server:
        yield server


@pytest.fixture
def environ(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """The Hub's address, and empty folders for its cache and as home."""
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path)}


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Hardware], None]:
    """Plan on the machine that it is given."""
    return lambda hardware: monkeypatch.setattr(gather, "detect", lambda environ: hardware)


@pytest.fixture
def blackwell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """This machine as one with an SM120 GPU that trials can use."""
    return Machine(tmp_path, monkeypatch, SM120)


@pytest.fixture
def b200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The same with a GPU whose FP4 products nibble's kernels do not have."""
    return Machine(tmp_path, monkeypatch, B200)


@pytest.fixture
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The same with a Hopper GPU."""
    return Machine(tmp_path, monkeypatch, HOPPER)
