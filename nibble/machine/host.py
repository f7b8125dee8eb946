"""What the host gives a process besides hardware: ports, shared memory, open files, a container
or not.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from nibble.machine.paths import home

SHM = Path("/dev/shm")
# vLLM raises its own soft limit to 65535 where the hard limit lets it (vllm 0.32
# utils/system_utils.py:241).
FEW_OPEN_FILES = 4096

BindProblem = Literal["in use", "no address of this machine", "not permitted"]


def has_cpp_compiler(environ: Mapping[str, str]) -> bool:
    """Whether torch finds what it compiles with for a CPU (torch 2.13 _inductor/config.py:1690)."""
    return (
        shutil.which(environ.get("CXX") or "g++", path=environ.get("PATH", os.defpath)) is not None
    )


def bind_problem(host: str, port: int) -> BindProblem | None:
    """Why a server cannot listen on `host`:`port`, or None. Tries it, as vLLM would (with
    SO_REUSEADDR).
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        return "no address of this machine"
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "in use"
        return (
            "not permitted"
            if error.errno in (errno.EACCES, errno.EPERM)
            else "no address of this machine"
        )
    return None


def shm_free_bytes() -> int | None:
    """What is free in /dev/shm, or None where there is none."""
    try:
        return shutil.disk_usage(SHM).free
    except OSError:
        return None


def open_files_limit() -> int:
    """The hard limit of open files; vLLM raises the soft one itself."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 1 << 30 if hard == resource.RLIM_INFINITY else hard


def open_files_problem(hard_limit: int) -> str | None:
    """A warning when a busy server would run out of file descriptors."""
    if hard_limit >= FEW_OPEN_FILES:
        return None
    return (
        f"only {hard_limit} files may be open: use `ulimit -Hn 65535` or --ulimit"
        " nofile=65535:65535"
    )


def cpu_problem(arch: str, flags: frozenset[str]) -> str | None:
    """What vLLM's CPU build needs and this CPU lacks (vllm 0.32 ships _C_AVX2 and _C_AVX512 for
    x86-64).
    """
    if arch != "x86_64" or not flags or "avx2" in flags:
        return None
    return "this x86-64 CPU has no AVX2"


def container_kind(environ: Mapping[str, str]) -> str | None:
    """kubernetes, podman, docker, or None outside a container."""
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "kubernetes"
    if Path("/run/.containerenv").exists():
        return "podman"
    return "docker" if Path("/.dockerenv").exists() else None


def elsewhere_hint(environ: Mapping[str, str], command: str) -> str:
    """Where a server of this image runs: in a container of its own, which another one does not
    see.
    """
    if "NIBBLE_IMAGE" not in environ:
        return ""
    return (
        f"; a server in another container is asked there: `docker exec CONTAINER nibble {command}`"
    )


def vllm_cache(environ: Mapping[str, str]) -> Path:
    """Where vLLM keeps compiled graphs (vllm 0.32 envs.py:712)."""
    root = environ.get("XDG_CACHE_HOME") or f"{home(environ)}/.cache"
    return Path(os.path.expanduser(environ.get("VLLM_CACHE_ROOT") or f"{root}/vllm"))
