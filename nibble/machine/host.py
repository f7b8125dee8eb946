"""What the host gives a process besides hardware: ports, shared memory, open files, container."""

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
# vLLM raises its soft limit to 65535 if the hard limit allows (vllm 0.32
# utils/system_utils.py:241).
FEW_OPEN_FILES = 4096

BindProblem = Literal["in use", "no address of this machine", "not permitted"]


def has_cpp_compiler(environ: Mapping[str, str]) -> bool:
    """Whether torch finds a C++ compiler for the CPU (torch 2.13 _inductor/config.py:1690)."""
    return (
        shutil.which(environ.get("CXX") or "g++", path=environ.get("PATH", os.defpath)) is not None
    )


def bind_problem(host: str, port: int) -> BindProblem | None:
    """Why a server cannot listen on `host`:`port`, or None. It binds with SO_REUSEADDR, as vLLM
    does.
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
    """Free bytes of /dev/shm, or None without it."""
    try:
        return shutil.disk_usage(SHM).free
    except OSError:
        return None


def open_files_limit() -> int:
    """The hard limit of open files; vLLM raises the soft limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 1 << 30 if hard == resource.RLIM_INFINITY else hard


def open_files_problem(hard_limit: int) -> str | None:
    """A warning if a busy server would run out of file descriptors."""
    if hard_limit >= FEW_OPEN_FILES:
        return None
    return (
        f"the limit of open files is {hard_limit}: run `ulimit -Hn 65535` or pass --ulimit"
        " nofile=65535:65535"
    )


def cpu_problem(arch: str, flags: frozenset[str]) -> str | None:
    """What this CPU lacks for vLLM's x86-64 build (vllm 0.32 has _C_AVX2 and _C_AVX512)."""
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


def start_command(environ: Mapping[str, str]) -> str:
    """What starts a server here, for messages."""
    return "`nibble serve`" if "NIBBLE_IMAGE" in environ else "`make serve`"


def elsewhere_hint(environ: Mapping[str, str], command: str) -> str:
    """A hint that a server of this image may run in another container."""
    if "NIBBLE_IMAGE" not in environ:
        return ""
    return f"; for a server in another container, run `docker exec CONTAINER nibble {command}`"


def vllm_cache(environ: Mapping[str, str]) -> Path:
    """vLLM's folder of compiled graphs (vllm 0.32 envs.py:712)."""
    root = environ.get("XDG_CACHE_HOME") or f"{home(environ)}/.cache"
    return Path(os.path.expanduser(environ.get("VLLM_CACHE_ROOT") or f"{root}/vllm"))
