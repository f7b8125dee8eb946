"""Tests of what runs around nibble: service managers, container engines, kernels, registries.

`make test-system` runs them; each machine they need is made by the tests and removed again.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.docker.images import *  # noqa: F403
from tests.support.system.arm import emulation


@pytest.fixture(scope="session")
def arm_emulated() -> Iterator[bool]:
    """An engine must start after it: BuildKit looks for its platforms at its start."""
    with emulation() as works:
        yield works


@pytest.fixture(scope="session")
def arm(arm_emulated: bool) -> None:
    if not arm_emulated:
        pytest.skip("this kernel starts no Arm programs (binfmt_misc)")
