"""Installs nibble-kernels: a wheel from build.sh, else compiled here, else plain torch code.

The first form that works is used.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from setup import venv
from setup.decide import SetupError, stamp_key
from setup.pip_runner import Pip, clean_environment

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels"
WHEELS = ROOT / "dist"
SUFFIXES = {".py", ".toml", ".h", ".cuh", ".cpp", ".cu"}
NOT_COPIED = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
# Lists every NVIDIA GPU without starting a process.
GPUS = Path("/proc/driver/nvidia/gpus")
INSTALL = ("install", "--no-deps", "--no-build-isolation", "--no-index", "--force-reinstall")


@dataclass(frozen=True)
class Machine:
    """What determines how nibble-kernels can be compiled here. A path is empty if there is no such
    file.
    """

    runtime: str
    compiler: str
    nvcc: str
    gpus: str
    chosen_wheel: str

    def key(self, sources: list[Path], wheels: list[Path]) -> str:
        """A hash for the stamp, of the sources, the wheels, the compilers and the GPUs."""
        facts = {name: str(value) for name, value in vars(self).items()}
        for wheel in wheels:
            facts[str(wheel)] = str(wheel.stat().st_mtime_ns)
        return stamp_key(sources, facts)


@dataclass(frozen=True)
class Form:
    """One way to install the package: what pip installs, in which environment, and the devices that
    need compiled code.
    """

    what: str
    source: Path
    environ: Mapping[str, str]
    devices: tuple[str, ...]


def look(runtime: str, environ: Mapping[str, str] = os.environ) -> Machine:
    """The compilers by their real paths, so that another version changes the stamp. Starts no
    process.
    """
    path = environ.get("PATH")
    compiler = nvcc = ""
    if environ.get("NIBBLE_KERNELS_COMPILE") != "0":
        compiler = shutil.which(environ.get("CXX") or "c++", path=path) or ""
    if runtime == "cuda" and compiler:
        # In the order of torch 2.13 utils/cpp_extension.py:_find_cuda_home.
        home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
        nvcc = (
            (home and f"{home}/bin/nvcc")
            or shutil.which("nvcc", path=path)
            or "/usr/local/cuda/bin/nvcc"
        )
    models = (
        sorted(file.read_text() for file in GPUS.glob("*/information")) if runtime == "cuda" else []
    )
    return Machine(
        runtime=runtime,
        compiler=os.path.realpath(compiler) if compiler else "",
        nvcc=os.path.realpath(nvcc) if Path(nvcc).is_file() else "",
        gpus="".join(models),
        chosen_wheel=environ.get("NIBBLE_KERNELS_WHEEL", ""),
    )


def sources() -> list[Path]:
    """Every file that the package is built from."""
    files = [*KERNELS.glob("*.*"), *(KERNELS / "src").rglob("*")]
    return [path for path in files if path.suffix in SUFFIXES]


def wheels() -> list[Path]:
    """The wheels that build.sh left for this processor, for any target, oldest first."""
    files = WHEELS.glob(f"*/nibble_kernels-*_{platform.machine()}.whl")
    return sorted(files, key=lambda path: path.stat().st_mtime)


class KernelsInstallation:
    """One installation into `folder`, a virtual environment with torch and setuptools."""

    def __init__(self, folder: Path, pip: Pip, machine: Machine) -> None:
        self.folder = folder
        self.pip = pip
        self.machine = machine
        self.targets = _targets() if machine.runtime == "cuda" else {"cpu": ""}

    def run(self) -> tuple[str, bool]:
        """Install the first form that works. Returns (sentence for the user, whether no form failed
        before it).
        """
        failed: list[str] = []
        for form in self._forms():
            # The environment's ninja comes first.
            path = f"{self.folder / 'bin'}:{os.environ.get('PATH', '')}"
            environ = {**form.environ, "PATH": path}
            if self.pip.attempt([*INSTALL, str(form.source)], environ)[0]:
                failed.append(f"{form.what} failed, see {self.pip.log}")
                continue
            implementations = self._implementations()
            problems = [
                implementations[device]
                for device in form.devices
                if implementations.get(device) != "compiled"
            ]
            if not problems:
                return self._sentence(implementations, form, "; ".join(failed)), not failed
            failed.append(f"{form.what}: {problems[0]}")
        what = f"nibble-kernels cannot be installed ({failed[-1]})"
        raise SetupError(
            6, what, "pip and setuptools in the environment", f"remove {self.folder}, run again"
        )

    def _forms(self) -> Iterator[Form]:
        """The forms in order of preference. The last one needs no compiler."""
        has_cuda = self.machine.runtime == "cuda"
        if wheel := self._wheel():
            yield Form(f"the wheel {wheel}", wheel, {}, ("cpu", "cuda") if has_cuda else ("cpu",))
        source_copy = self._copy()
        arch_list = ";".join(sorted({arch for arch in self.targets.values() if arch}))
        if self.machine.compiler and self.machine.nvcc and arch_list:
            yield Form(
                "compiling CUDA", source_copy, {"TORCH_CUDA_ARCH_LIST": arch_list}, ("cpu", "cuda")
            )
        if self.machine.compiler:
            yield Form("compiling C++", source_copy, {"TORCH_CUDA_ARCH_LIST": ""}, ("cpu",))
        yield Form("installing plain torch code", source_copy, {"NIBBLE_KERNELS_COMPILE": "0"}, ())

    def _wheel(self) -> Path | None:
        """NIBBLE_KERNELS_WHEEL, else the newest wheel of this machine's target that is not older
        than the sources.
        """
        if self.machine.chosen_wheel:
            path = Path(self.machine.chosen_wheel).expanduser().resolve()
            if path.suffix == ".whl" and path.is_file():
                return path
            raise SetupError(
                2, f"NIBBLE_KERNELS_WHEEL: {path} is not a wheel", "a .whl file", "correct the path"
            )
        newest_source = max(path.stat().st_mtime for path in sources())
        for wheel in reversed(wheels()):
            if list(self.targets) == [wheel.parent.name] and wheel.stat().st_mtime >= newest_source:
                return wheel
        return None

    def _copy(self) -> Path:
        """A writable copy of the sources for setuptools. Earlier object files stay, and ninja uses
        them again.
        """
        copy = self.folder / "nibble-setup" / "kernels"
        for stale in [copy / "src", *copy.glob("build/lib*")]:
            shutil.rmtree(stale, ignore_errors=True)
        shutil.copytree(KERNELS, copy, ignore=NOT_COPIED, dirs_exist_ok=True)
        return copy

    def _implementations(self) -> dict[str, str]:
        """nibble_kernels.implementations() in the environment: device -> "compiled" or the reason
        why not.
        """
        code = "import json, nibble_kernels; print(json.dumps(nibble_kernels.implementations()))"
        done = subprocess.run(
            [str(venv.python_of(self.folder)), "-P", "-c", code],
            env=clean_environment(dict(os.environ)),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return {"cpu": (done.stderr.strip().splitlines() or ["it does not load"])[-1]}
        return json.loads(done.stdout.splitlines()[-1])

    def _sentence(self, implementations: Mapping[str, str], form: Form, failed: str) -> str:
        """What is installed, for the user. `failed` says why better forms failed, empty if none was
        tried.
        """
        slow = (
            "NVFP4 on the CPU" if self.machine.runtime == "cpu" else "what nibble computes itself"
        )
        if not form.devices:
            why, fix = "no C++ compiler found", "install g++"
            if failed:
                why = failed
                fix = "fix that, name another compiler with CXX=… or set NIBBLE_KERNELS_COMPILE=0,"
            elif os.environ.get("NIBBLE_KERNELS_COMPILE") == "0":
                why, fix = "NIBBLE_KERNELS_COMPILE=0", "unset that"
            return (
                f"kernels: plain torch ({why}): {slow} will be slow; {fix} and run make setup again"
            )
        origin = f"from {form.source}" if form.source.suffix == ".whl" else "compiled here"
        if self.machine.runtime == "cpu":
            return f"kernels: {origin}" + (f" ({failed})" if failed else "")
        if implementations.get("cuda") == "compiled":
            return f"kernels: {origin} for the CPU and {', '.join(self.targets) or 'the GPU'}"
        why = failed or ("no target of this GPU" if self.machine.nvcc else "no nvcc found")
        return (
            f"kernels: {origin} for the CPU, plain torch on the GPU ({why}): {slow} will be slow"
            " there"
        )


def _targets() -> dict[str, str]:
    """Target -> its TORCH_CUDA_ARCH_LIST, for every NVIDIA GPU here that has a target."""
    # This module, like the patching code, needs only the standard library.
    from nibble.machine.targets import target_for_capability

    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        capabilities = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60
        ).stdout
    except OSError:
        return {}
    targets: dict[str, str] = {}
    for line in capabilities.split():
        major, _, minor = line.partition(".")
        target = target_for_capability((int(major), int(minor))) if minor.isdigit() else None
        if target is not None:
            targets[target.name] = target.torch_cuda_arch_list
    return targets
