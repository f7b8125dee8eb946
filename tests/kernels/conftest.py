"""nibble-kernels built as a user's machine builds it, once for all tests and again when a source
changes.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.kernels.kernel_build import (
    build_folder,
    cuda_targets,
    of_make_setup,
    pip_install,
)
from tests.support.once import once


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
