"""A local Hugging Face Hub and the environment of its client; a file with other needs overrides
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.hub import Hub


@pytest.fixture
def hub() -> Iterator[Hub]:
    """Without a repository."""
    with Hub() as server:
        yield server


@pytest.fixture
def environ(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """The Hub's address, and empty folders for its cache and as home."""
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path)}
