"""Small CUDA sources compiled for one architecture, and the instructions that come out; nothing
runs on a GPU.
"""

from __future__ import annotations

import importlib.machinery
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Compiled:
    """What nvcc made of a source: an object, or the first error."""

    path: Path | None
    error: str = ""

    def __bool__(self) -> bool:
        return self.path is not None


def find_nvcc() -> str | None:
    """The CUDA compiler: in PATH, else in CUDA_HOME or /usr/local/cuda."""
    return shutil.which("nvcc") or _in_folders(
        "nvcc", (f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin",)
    )


def find_cuobjdump() -> str | None:
    """NVIDIA's disassembler: in PATH, beside nvcc, or from the wheel nvidia-cuda-cuobjdump (it
    runs nvdisasm beside it).
    """
    beside = [Path(nvcc).resolve().parent for nvcc in (find_nvcc(),) if nvcc]
    wheels = [Path(folder) / f"nvidia/cu{major}/bin" for folder in sys.path for major in (13, 14)]
    return shutil.which("cuobjdump") or _in_folders(
        "cuobjdump", [*beside, "/usr/local/cuda/bin", *wheels]
    )


def _in_folders(name: str, folders: Iterable[str | Path]) -> str | None:
    return shutil.which(name, path=os.pathsep.join(map(str, folders)))


def package_folder(name: str) -> Path | None:
    """Where an installed package lies; it is not imported."""
    found = importlib.machinery.PathFinder.find_spec(name)
    return Path(found.origin).parent if found and found.origin else None


def has_cuda_13() -> bool:
    """Whether there is an nvcc of CUDA 13 or newer, the one the probes' questions are about."""
    nvcc = find_nvcc()
    if nvcc is None:
        return False
    told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release (\d+)\.", told)
    return found is not None and int(found[1]) >= 13


def compile_source(
    source: str, arch: str, folder: Path, include: Sequence[Path] = (), flags: Sequence[str] = ()
) -> Compiled:
    """Compile a CUDA source for `arch`, such as 121a, to machine code only (a .cubin in
    `folder`).
    """
    path, result = folder / f"source_{arch}.cu", folder / f"source_{arch}.cubin"
    path.write_text(source)
    words = [
        find_nvcc() or "nvcc",
        "-cubin",
        f"-gencode=arch=compute_{arch},code=sm_{arch}",
        "-std=c++17",
    ]
    words += [*(f"-I{one}" for one in include), *flags, "-o", str(result), str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return Compiled(result)
    errors = re.findall(r"^.*?\berror\b\s*:?\s*(.*)$", done.stderr + done.stdout, re.MULTILINE)
    return Compiled(None, errors[0] if errors else f"nvcc ended with {done.returncode}")


def build_and_run(source: str, arch: str, folder: Path) -> str:
    """Build a program with code for `arch` in it and run its main(), which must not ask for a
    GPU; what it printed.
    """
    path, program = folder / "program.cu", folder / "program"
    path.write_text(source)
    words = [
        find_nvcc() or "nvcc",
        f"-gencode=arch=compute_{arch},code=sm_{arch}",
        "-std=c++17",
        "-o",
        str(program),
        str(path),
    ]
    subprocess.run(words, capture_output=True, check=True)
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout


def instructions(binary: Path, pattern: str) -> Counter[str] | None:
    """How often each opcode that `pattern` matches is in the machine code; None where nothing
    here can disassemble.
    """
    tool = find_cuobjdump()
    if tool is None:
        return None
    environ = os.environ | {
        "PATH": os.pathsep.join([str(Path(tool).parent), os.environ.get("PATH", "")])
    }
    listing = subprocess.run(
        [tool, "-sass", str(binary)], capture_output=True, text=True, check=True, env=environ
    ).stdout
    opcodes = re.findall(
        r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+ )?([A-Z][A-Z0-9_.]*)", listing, re.MULTILINE
    )
    return Counter(opcode for opcode in opcodes if re.search(pattern, opcode))


def seen(found: Counter[str] | None) -> str:
    """3 F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C"""
    if found is None:
        return "machine code not looked at: no cuobjdump here"
    return (
        ", ".join(f"{count} {opcode}" for opcode, count in sorted(found.items()))
        or "no such instruction"
    )
