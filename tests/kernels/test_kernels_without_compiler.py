"""Where nothing could be compiled, the package imports, computes the same, and says so in one
line.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.changes import OPERATORS
from tests.support.kernels.kernel_build import KERNELS, pip_install

PROGRAM = """
import torch
from nibble_kernels import implementations
from nibble_kernels.conversions import conversion_report, e2m1_encode
from nibble_kernels.activation_quant import add_rmsnorm_nvfp4_quant, nvfp4_quant, silu_mul_nvfp4_quant
from nibble_kernels.quartet2.quantize import quant_fp4

x = torch.ones(3, 64, dtype=torch.bfloat16)
codes, scales = nvfp4_quant(x, torch.tensor([448.0]))
silu_mul_nvfp4_quant(x, torch.ones(1)), add_rmsnorm_nvfp4_quant(x, x, x[0], torch.ones(1), 1e-6), quant_fp4(x)
assert codes.unique().tolist() == [0x77] and e2m1_encode(x).unique().tolist() == [0x22]
print(implementations()["cpu"], conversion_report("cpu")["e2m1"])
"""  # noqa: E501


def run(program: str, packages: Path | str, **more: str) -> subprocess.CompletedProcess[str]:
    """In a process that finds no g++, nvcc or anything else on PATH."""
    environ = {
        "PATH": "",
        "PYTHONPATH": str(packages),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": os.environ.get("HOME", "/"),
        **more,
    }
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environ
    )


def test_from_the_sources_alone() -> None:
    done = run(PROGRAM, KERNELS / "src")
    assert done.stdout == "not compiled when it was installed software\n"
    lines = [line for line in done.stderr.splitlines() if "nibble-kernels" in line]
    assert len(lines) == 1
    assert lines[0].startswith(
        "nibble-kernels: plain torch code, much slower, on cpu (not compiled"
    )


def test_in_vllms_processes_the_supervisor_says_it_for_all_of_them(tmp_path: Path) -> None:
    begin = "from nibble.engine import plugin; plugin.quiet_operators()\n"
    packages = f"{KERNELS / 'src'}:{KERNELS.parent}"
    for variable, is_told in (("NIBBLE_PROOF", False), ("OTHER", True)):
        done = run(begin + PROGRAM, packages, **{variable: str(tmp_path)})
        assert done.stdout == "not compiled when it was installed software\n"
        assert ("nibble-kernels" in done.stderr) == is_told


def test_compiled_it_says_nothing(installed: Path) -> None:
    done = run(PROGRAM, installed)
    assert done.stdout == "compiled software\n"
    assert "nibble-kernels" not in done.stderr


@pytest.mark.when_changed(*OPERATORS)
def test_installed_where_there_is_no_compiler(tmp_path: Path) -> None:
    """pip installs the package without compiled parts instead of failing."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in {"CXX", "TORCH_CUDA_ARCH_LIST"}
    }
    pip_install(tmp_path / "site", environ | {"PATH": ""})
    assert not list(tmp_path.rglob("*.so"))
    assert "not compiled" in run(PROGRAM, tmp_path / "site").stdout


def test_a_library_that_does_not_load_is_told(installed: Path, tmp_path: Path) -> None:
    """Such as one for another processor: plain torch code, and the loader's reason."""
    package = tmp_path / "nibble_kernels"
    subprocess.run(["cp", "-r", installed / "nibble_kernels", package], check=True)
    next(package.glob("_cpu*.so")).write_bytes(b"no library")
    done = run(PROGRAM, tmp_path)
    assert done.stdout.startswith("does not load: ")
    assert "plain torch code" in done.stderr


def test_the_libraries_need_nothing_of_torch_but_its_stable_interface(installed: Path) -> None:
    """Functions of C named aoti_torch_… and torch_…, so that any later version of torch loads
    them.
    """
    for library in (installed / "nibble_kernels").glob("*.so"):
        told = subprocess.run(
            ["nm", "-DC", "--undefined-only", library], capture_output=True, text=True, check=True
        )
        symbols = {
            line.split()[-1]
            for line in told.stdout.splitlines()
            if "torch" in line or "c10" in line or "Py" in line
        }
        assert symbols
        assert [name for name in symbols if not name.startswith(("aoti_torch_", "torch_"))] == []
