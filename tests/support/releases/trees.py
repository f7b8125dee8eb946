"""Unpacked releases of vLLM to probe and to patch, fetched once from the package index and kept
between runs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from nibble.engine.patching.apply import apply_series
from nibble.engine.patching.series import Series, load_series
from nibble.engine.patching.tree import open_tree
from tests.support.once import once

# What pip downloads, by requirement and sha256: the x86-64 CUDA wheels, and beside 0.32.0 the
# FlashInfer it pins.
WHEELS = {
    "0.15.1": {"vllm==0.15.1": "d3810299d331fc1031c8a2a9886f1f0e0cc2f14ddad284d337174324b1c83e92"},
    "0.16.0": {"vllm==0.16.0": "f066b2a2f8597a4a3ada8fbbfd122b59086864b2260ca42dc81bf9fb57af0c42"},
    "0.32.0": {
        "vllm==0.32.0": "5e2ecdc5b0baf72921c288486417ca82778456a448e4fe60b62ee43c0dfc8611",
        "flashinfer-python==0.7.0.post1": (
            "c7adf826568d61fc1b7d3aadd4cae387a35a138bfc08e2deca2f34ecfa280716"
        ),
    },
}
SDISTS = {
    "0.16.0": "1f684bb31fbef59d862e2fe666e23a41f1d39d93f86215ce1ce1db89a8f5665b",
    "0.32.0": "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
}
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nibble-tests" / "trees"


def pristine(version: str) -> Path:
    """The unpacked wheel of a release, as a site-packages. Never write into it; Python keeps its
    bytecode there.
    """
    return once(CACHE / version, lambda folder: _unpack_wheels(version, folder))


def source_tree(version: str) -> Path:
    """The unpacked source archive of a release. Never write into it."""
    return once(CACHE / f"sdist-{version}", lambda folder: _unpack_sdist(version, folder))


def copy_of(tree: Path, folder: Path) -> Path:
    """A copy to patch: hard links, which nibble.engine.patching replaces and never writes
    through.
    """
    shutil.copytree(tree, folder, copy_function=os.link, symlinks=True)
    return folder


def patched(folder: Path, without: tuple[str, ...] = (), tree: Path | None = None) -> Path:
    """A copy of `tree` (default: the wheel of 0.32.0) in `folder` with the series, less the
    patches named.
    """
    copy = copy_of(tree or pristine("0.32.0"), folder)
    whole = load_series("vllm")
    kept = tuple(patch for patch in whole.patches if patch.name not in without)
    apply_series(open_tree(copy), Series(whole.project, whole.release, kept, whole.pristine))
    return copy


def _unpack_wheels(version: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as downloads:
        lock = Path(downloads) / "lock.txt"
        lock.write_text(
            "".join(f"{name} --hash=sha256:{digest}\n" for name, digest in WHEELS[version].items())
        )
        words = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--require-hashes",
        ]
        subprocess.run([*words, "-r", str(lock), "-d", downloads], check=True)
        for wheel in Path(downloads).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)
    (
        folder / "vllm/__pycache__"
    ).mkdir()  # so that probes leave bytecode in the tree, for its copies too


def _unpack_sdist(version: str, folder: Path) -> None:
    """`pip download` would build the archive's metadata, which needs torch; unearth only finds
    and fetches.
    """
    with tempfile.TemporaryDirectory() as scratch:
        environment = Path(scratch) / "environment"
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        bin_folder = environment / "bin"
        subprocess.run(
            [str(bin_folder / "pip"), "install", "--quiet", "unearth==0.19.0"], check=True
        )
        words = [
            str(bin_folder / "unearth"),
            f"vllm=={version}",
            "--no-binary",
            "--download",
            scratch,
        ]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        archive = Path(scratch) / f"vllm-{version}.tar.gz"
        assert hashlib.sha256(archive.read_bytes()).hexdigest() == SDISTS[version], archive
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        for entry in (Path(scratch) / f"vllm-{version}").iterdir():
            shutil.move(entry, folder)
