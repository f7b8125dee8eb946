"""nibble-kernels built as a user's machine builds it, once for all tests and again when a source
changes.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from once import once

from setup import kernels as kernel_setup
from setup.venv import read_stamp

REPO = Path(__file__).resolve().parents[2]
KERNELS = REPO / "kernels"


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
    return REPO / ".cache/kernels" / digest.hexdigest()[:16]


@pytest.fixture(scope="session")
def installed() -> Path:
    """A folder with the package in it, compiled for this machine."""
    if (folder := of_make_setup()) is not None:
        return folder
    if not shutil.which("c++"):
        pytest.skip("no C++ compiler here")
    folder = build_folder()

    def install(scratch: Path) -> None:
        for old in folder.parent.glob("*"):
            if time.time() - old.stat().st_mtime > 86400:
                shutil.rmtree(old, ignore_errors=True)
        pip_install(scratch, os.environ | {"TORCH_CUDA_ARCH_LIST": cuda_targets()})

    return once(folder, install)


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


@pytest.fixture(scope="session")
def kernels(installed: Path) -> ModuleType:
    """The package, compiled."""
    sys.path.insert(0, str(installed))
    return importlib.import_module("nibble_kernels")


@pytest.fixture(params=["reference", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def implementation(request: pytest.FixtureRequest, kernels: ModuleType) -> str:
    """The specification, compiled C++ and CUDA."""
    if request.param != "reference":
        assert kernels.implementations()[request.param] == "compiled", kernels.implementations()
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def compiled(request: pytest.FixtureRequest, kernels: ModuleType) -> str:
    """The device of what is compared with the specification."""
    assert kernels.implementations()[request.param] == "compiled", kernels.implementations()
    return request.param
