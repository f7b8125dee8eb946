"""nibble-kernels built as a user's machine builds it, in a folder for these sources."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from setup import kernels as kernel_setup
from setup.venv import read_stamp
from tests.support.paths import ROOT

KERNELS = ROOT / "kernels"


def cuda_targets() -> str:
    """TORCH_CUDA_ARCH_LIST for the GPU that is here, where it can be compiled for."""
    if not torch.cuda.is_available() or not shutil.which("nvcc"):
        return ""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}a"


def of_make_setup() -> Path | None:
    """The site-packages in which `make setup` compiled these very sources for the CPU; None
    where it did not, or more is due.
    """
    machine = kernel_setup.look("cpu")
    stamp = read_stamp(Path(sys.prefix))
    same = stamp.get("kernels") == machine.key(kernel_setup.sources(), kernel_setup.wheels())
    return (
        Path(sysconfig.get_path("purelib"))
        if same and machine.compiler and not cuda_targets()
        else None
    )


def build_folder() -> Path:
    """Where these sources are installed for this Python, torch and GPU."""
    digest = hashlib.sha256(f"{torch.__version__} {cuda_targets()} {sys.version}".encode())
    for path in sorted(KERNELS.glob("*.*")) + sorted((KERNELS / "src").rglob("*")):
        if path.suffix in {".py", ".toml", ".h", ".cuh", ".cpp", ".cu"}:
            digest.update(path.read_bytes())
    return ROOT / ".cache/kernels" / digest.hexdigest()[:16]


def pip_install(target: Path, environ: dict[str, str]) -> None:
    """Install a copy of the sources, because setuptools writes beside them (and keeps what it
    wrote).
    """
    copy = target.with_suffix(".sources")
    shutil.copytree(
        KERNELS, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    )
    words = [
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(target),
    ]
    subprocess.run([sys.executable, "-m", "pip", *words, str(copy)], check=True, env=environ)
    shutil.rmtree(copy)
