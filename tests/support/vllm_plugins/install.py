"""Put a plugin of this package where a vLLM that a test starts finds it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from tests.support.paths import ROOT, python_path


def install(folder: Path, plugin: ModuleType) -> dict[str, str]:
    """Write the entry point of `plugin` into `folder`; the PYTHONPATH with which vLLM finds it.

    vLLM calls `plugin.register`. Beside the entry point the folder has the package `tests` alone:
    the checkout itself would add folders that have the names of packages (`kernels`).
    """
    name = plugin.__name__.rpartition(".")[2]
    info = folder / f"{name}-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1\n"
    )
    (info / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{name} = {plugin.__name__}:register\n"
    )
    if not (folder / "tests").exists():
        (folder / "tests").symlink_to(ROOT / "tests")
    return {"PYTHONPATH": python_path(folder)}
