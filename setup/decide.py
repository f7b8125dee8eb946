"""The installer's decisions, each with its reason. Pure: no network, no processes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from setup import pins

MACHINES = ("x86_64", "aarch64")
# Device files of the driver on every machine with a usable NVIDIA GPU, GB10 included; /dev/dxg is
# WSL2's.
GPU_SIGNS = ("/dev/nvidia0", "/dev/dxg")


class SetupError(Exception):
    """One line for the user, and an exit code of docs/operations.md."""

    def __init__(self, code: int, what: str, expected: str, action: str) -> None:
        self.code = code
        super().__init__(f"{what}; expected {expected}; {action}")


@dataclass(frozen=True)
class Choice:
    """A decided value and its reason."""

    value: str
    reason: str


@dataclass(frozen=True)
class OfficialWheel:
    """NIBBLE_VLLM_CPU_WHEEL, parsed: the wheel's address and the sha256 that it must have."""

    url: str
    sha256: str

    def requirement(self) -> str:
        """A line of a pip requirements file, with the hash that pip checks."""
        return f"vllm @ {self.url} --hash=sha256:{self.sha256}\n"


@dataclass(frozen=True)
class TorchSource:
    """A place that may have CPU torch: pip's arguments, its name in messages, and a URL to test
    first, if any.
    """

    name: str
    pip_args: tuple[str, ...]
    probe_url: str = ""


def check_machine(system: str, machine: str) -> None:
    """Refuse machines without a wheel: vLLM 0.32.0 has wheels only for Linux on x86-64 and
    aarch64.
    """
    if system == "Linux" and machine in MACHINES:
        return
    raise SetupError(
        3,
        f"no vLLM {pins.VLLM_VERSION} wheel runs on {system} {machine}",
        "Linux on x86-64 or aarch64",
        "use the container image or another machine",
    )


def choose_runtime(requested: str, exists: Callable[[str], bool], has_nvidia_smi: bool) -> Choice:
    """cpu or cuda: the requested one, else cuda if the NVIDIA driver is present."""
    if requested != "auto":
        return Choice(requested, "set by the user")
    for sign in GPU_SIGNS:
        if exists(sign) and (has_nvidia_smi or sign != "/dev/dxg"):
            return Choice("cuda", f"{sign} is here")
    return Choice("cpu", "no NVIDIA GPU found")


def parse_official_wheel(value: str | None) -> OfficialWheel | None:
    """Parse NIBBLE_VLLM_CPU_WHEEL, a URL or path that ends in #sha256=<64 hex digits>; None if
    unset or empty.
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
    """The places to look for CPU torch, in order.

    Only NIBBLE_TORCH_INDEX if it is set (a URL, a folder of wheels, or "pip" for pip's
    configuration): a user who names an index does not want another. Else PyTorch's index, then
    pip's configuration.
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
    """The lock without one package's entry: its line and the indented hash lines below it."""
    kept: list[str] = []
    dropping = False
    for line in lock.splitlines(keepends=True):
        if not line.startswith((" ", "\t")):
            dropping = re.match(rf"{re.escape(name)}\s*(==|@|\[)", line) is not None
        if not dropping:
            kept.append(line)
    return "".join(kept)


def stamp_key(files: Iterable[Path], facts: Mapping[str, str]) -> str:
    """A hash of what an installation depends on: the contents of files, and named facts."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    for name, value in sorted(facts.items()):
        digest.update(f"\0{name}={value}".encode())
    return digest.hexdigest()
