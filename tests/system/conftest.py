"""Tests of what runs around nibble: service managers, container engines, kernels, registries.

`make test-system` runs them; each machine they need is made by the tests and removed again.
"""

from __future__ import annotations

from tests.support.docker.images import *  # noqa: F403
