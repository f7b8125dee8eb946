"""Applies patches/vllm/series to the vLLM in ROOT, a site-packages or an unpacked source archive;
exit code 6 if that fails.

usage: PYTHONPATH=/patching apply_patches.py ROOT [SOURCE]

/patching holds patches/vllm and the modules of nibble that apply it. SOURCE is the patched source
that ROOT's vLLM was compiled from. Its patched Python files are first replaced by the released
ones, so that ROOT is patched and recorded like a wheel.
"""

import compileall
import shutil
import sys
from pathlib import Path

from nibble.engine.patching.apply import RECORD_FOLDER, apply_series
from nibble.engine.patching.series import load_series
from nibble.engine.patching.tree import open_tree
from nibble.errors import NibbleError


def main(root: Path, source: Path | None = None) -> None:
    series = load_series("vllm")
    if source and (released := source / RECORD_FOLDER / "originals" / "vllm").is_dir():
        shutil.copytree(released, root / "vllm", dirs_exist_ok=True)
    tree = open_tree(root)
    applied = apply_series(tree, series)
    if tree.layout == "wheel":
        # pip compiled the released files, and at run time site-packages is read-only.
        for path in sorted(
            {path for patch in series.patches for path in patch.paths if tree.has(path)}
        ):
            compileall.compile_file(tree.path(path), quiet=1)
    print(f"patches applied to {root}: {', '.join(applied)}")


if __name__ == "__main__":
    try:
        main(*map(Path, sys.argv[1:]))
    except NibbleError as error:
        print(f"error: {error.line()}", file=sys.stderr)
        sys.exit(error.code)
