"""Folders of the checkout, and PYTHONPATH for processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
# Programs that tests run by path: on PYTHONPATH the checkout would add folders that have the names
# of packages (`kernels`).
IN_VLLM = SUPPORT / "in_vllm"
# On PYTHONPATH it makes vLLM's CPU platform good enough for clusters.
CLUSTER_PLATFORM = SUPPORT / "vllm_plugins" / "cluster_platform"
VECTORS = ROOT / "tests" / "kernels" / "vectors"


def python_path(*folders: Path) -> str:
    """PYTHONPATH with these folders first, then what this process has there."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, folders), *([given] if given else [])])
