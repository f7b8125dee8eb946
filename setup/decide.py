"""The installer's decisions, as values with their reasons; nothing here touches a network or
starts a process.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from setup import pins

MACHINES = ("x86_64", "aarch64")
# What the driver leaves on any machine with a usable NVIDIA GPU (GB10 included); /dev/dxg is
# WSL2's.
GPU_SIGNS = ("/dev/nvidia0", "/dev/dxg")


class SetupError(Exception):
    """One line for the user and an exit code (docs/operations.md)."""

    def __init__(self, code: int, what: str, expected: str, action: str) -> None:
        self.code = code
        super().__init__(f"{what}; expected {expected}; {action}")


@dataclass(frozen=True)
class Choice:
    """A decided value and the sentence that says why."""

    value: str
    reason: str


@dataclass(frozen=True)
class OfficialWheel:
    """NIBBLE_VLLM_CPU_WHEEL taken apart: where the wheel is and the sha256 it must have."""

    url: str
    sha256: str

    def requirement(self) -> str:
        """A line for a pip requirements file that pip checks against the hash."""
        return f"vllm @ {self.url} --hash=sha256:{self.sha256}\n"


@dataclass(frozen=True)
class TorchSource:
    """One place to ask for CPU torch: the pip arguments, how to name it, and the URL to knock at
    first, if any.
    """

    name: str
    pip_args: tuple[str, ...]
    probe_url: str = ""


def check_machine(system: str, machine: str) -> None:
    """Refuse what no wheel exists for: vLLM 0.32.0 has Linux wheels for x86-64 and aarch64 only."""
    if system == "Linux" and machine in MACHINES:
        return
    raise SetupError(
        3,
        f"no vLLM {pins.VLLM_VERSION} wheel runs on {system} {machine}",
        "Linux on x86-64 or aarch64",
        "use the container image or another machine",
    )


def choose_runtime(asked: str, exists: Callable[[str], bool], has_nvidia_smi: bool) -> Choice:
    """cpu or cuda: what was asked for, else cuda where an NVIDIA driver shows itself."""
    if asked != "auto":
        return Choice(asked, "asked for")
    for sign in GPU_SIGNS:
        if exists(sign) and (has_nvidia_smi or sign != "/dev/dxg"):
            return Choice("cuda", f"{sign} is here")
    return Choice("cpu", "no NVIDIA GPU found")


def parse_official_wheel(value: str | None) -> OfficialWheel | None:
    """Read NIBBLE_VLLM_CPU_WHEEL: a URL or a path that ends in #sha256=<64 hex digits>; None
    when unset or empty.
    """
    if not value:
        return None
    location, _, fragment = value.partition("#")
    match = re.fullmatch(r"sha256=([0-9a-fA-F]{64})", fragment)
    if not location.split("?")[0].endswith(".whl") or not match:
        raise SetupError(
            2,
            f"NIBBLE_VLLM_CPU_WHEEL={value} cannot be checked",
            "a URL or a path of a .whl that ends in #sha256=<64 hex digits>",
            "add the wheel's sha256",
        )
    if not urlsplit(location).scheme:
        path = Path(location).expanduser().resolve()
        if not path.is_file():
            raise SetupError(
                2,
                f"NIBBLE_VLLM_CPU_WHEEL: {path} does not exist",
                "a wheel file",
                "correct the path",
            )
        location = path.as_uri()
    return OfficialWheel(location, match[1].lower())


def torch_sources(index: str | None) -> list[TorchSource]:
    """Where CPU torch is looked for, in order.

    NIBBLE_TORCH_INDEX alone when it is set (a URL, a folder of wheels, or "pip" for pip's own
    configuration), as a user who names an index does not want another; else PyTorch's, then
    whatever pip is configured with.
    """
    configured = TorchSource("pip's configured index", ())
    if not index:
        url = pins.TORCH_CPU_INDEX
        # --retries 0: the second source is the retry.
        return [
            TorchSource(url, ("--retries", "0", "--index-url", url), f"{url}/torch/"),
            configured,
        ]
    if index == "pip":
        return [configured]
    if Path(index).expanduser().is_dir():
        folder = str(Path(index).expanduser().resolve())
        return [TorchSource(folder, ("--no-index", "--find-links", folder))]
    if urlsplit(index).scheme not in ("http", "https", "file"):
        raise SetupError(
            2,
            f"NIBBLE_TORCH_INDEX={index} is not an index",
            "a URL, a folder of wheels, or 'pip'",
            "correct or unset it",
        )
    return [TorchSource(index, ("--index-url", index))]


def without_package(lock: str, name: str) -> str:
    """The lock without one package's entry (its line and the indented hash lines under it)."""
    kept: list[str] = []
    dropping = False
    for line in lock.splitlines(keepends=True):
        if not line.startswith((" ", "\t")):
            dropping = re.match(rf"{re.escape(name)}\s*(==|@|\[)", line) is not None
        if not dropping:
            kept.append(line)
    return "".join(kept)


def stamp_key(files: Iterable[Path], facts: Mapping[str, str]) -> str:
    """A hash of everything an installation depends on: files by content, and named facts."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    for name, value in sorted(facts.items()):
        digest.update(f"\0{name}={value}".encode())
    return digest.hexdigest()
