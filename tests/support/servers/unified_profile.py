"""GB10's memory profile forced on the CPU: its target file says `unified`, and a worker checks
free memory as vLLM does there.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT
from tests.support.vllm_plugins import vllm_unified_memory
from tests.support.vllm_plugins.install import install

REPORT = "checked.json"


def force_unified_memory(folder: Path) -> dict[str, str]:
    """The variables of such a start; `folder` gets a root of nibble's with another
    targets/cpu.toml, and the plugin.

    What an engine takes beside weights and KV cache stays the CPU's: GB10's 6.7 GiB are more than a
    test's cgroup has.
    """
    root = folder / "root"
    root.mkdir(parents=True)
    for name in ("recipes", "rules", "models", "patches"):
        (root / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "targets", root / "targets")
    target = root / "targets" / "cpu.toml"
    text = target.read_text()
    assert text.count('kind = "host"') == 1
    target.write_text(text.replace('kind = "host"', 'kind = "unified"'))
    report = {"UNIFIED_MEMORY_REPORT": str(folder / REPORT)}
    return {"NIBBLE_ROOT": str(root), **install(folder / "plugin", vllm_unified_memory), **report}


def what_was_checked(folder: Path) -> dict[str, Any]:
    """What the worker compared, after `force_unified_memory(folder)`."""
    return json.loads((folder / REPORT).read_text())
