"""`nibble doctor`: what on this machine stops or slows a server, each with its fix."""

from __future__ import annotations

import platform
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from nibble.cli.doctor.machine import machine_checks, model_checks
from nibble.cli.doctor.report import Check, Report
from nibble.cli.doctor.software import (
    implementations,
    installed,
    installed_patches,
    kernels_check,
    patch_checks,
    python_checks,
)
from nibble.cli.doctor.trials import selftest_check
from nibble.errors import NibbleError
from nibble.hub.access import Access, access, in_words
from nibble.machine.cpus import ComputeCores
from nibble.machine.disk import (
    folder_bytes,
    free_bytes,
    gib,
    nearest_existing,
    secret_mode,
    writable_fix,
    write_problem,
)
from nibble.machine.gpu_state import gpu_states
from nibble.machine.hardware import Hardware, detect
from nibble.machine.host import (
    bind_problem,
    container_kind,
    open_files_limit,
    open_files_problem,
    shm_free_bytes,
    vllm_cache,
)
from nibble.machine.paths import cache_dir
from nibble.machine.read_bandwidth import read_bandwidth
from nibble.machine.targets import Target
from nibble.plan.gather import Asked, choose_target, read_wishes
from nibble.plan.shared_memory import ADVICE, MIB, SEVERAL_WORKERS_BYTES, SMALL_QUEUES_BYTES
from nibble.serve.api_key import KEY_FILE
from nibble.serve.preflight.machine import check_driver, check_hardware

HUB_TIMEOUT_SECONDS = 3
LITTLE_DISK_BYTES = 20 << 30  # a small quantized model and its caches
LITTLE_MEMORY_BYTES = 4 << 30


def diagnose(environ: Mapping[str, str], model: str | None = None) -> Report:
    """Check this machine with the settings of `environ`, and a start of `model`. It raises nothing
    and changes nothing.
    """
    versions = installed()
    checks = list(python_checks(versions, platform.python_version()))
    checks.append(kernels_check(versions, implementations, environ))
    tree, table = installed_patches()
    checks += patch_checks(tree, table) if tree else []
    asked, settings_check = _settings(environ)
    if asked:  # a settings file may name the folder too
        environ = {**environ, "NIBBLE_CACHE_DIR": str(asked.cache)}
    here = detect(environ)
    checks += [settings_check, *hardware_checks(asked, here), memory_check(here)]
    checks += _disk_checks(environ) + _port_checks(asked)
    checks += _hub_checks(environ) + _key_check(environ) + _limit_checks(here)
    states = gpu_states(gpu.index for gpu in here.gpus) if here.gpus else ()
    target = _target(asked, here)
    checks += machine_checks(target, here, versions, states, environ)
    checks += selftest_check(asked, target, here)
    checks += model_checks(model, environ) if model else []
    kind = container_kind(environ)
    image = f", image {environ['NIBBLE_IMAGE']}" if "NIBBLE_IMAGE" in environ else ""
    checks.append(
        Check("container", "ok", f"{kind}{image}" if kind else "none: running on the host")
    )
    return Report(tuple(checks), tree, table)


def _settings(environ: Mapping[str, str]) -> tuple[Asked | None, Check]:
    try:
        asked = read_wishes([], environ)
    except NibbleError as error:
        return None, Check("settings", "fail", error.what, error.action)
    notices = "; ".join(asked.accepted.notices)
    return asked, Check("settings", "ok", notices or "every variable is known")


def _target(asked: Asked | None, here: Hardware) -> Target | None:
    try:
        return choose_target(asked.settings, asked, here)[0] if asked else None
    except NibbleError:  # said by the check of the target
        return None


def hardware_checks(asked: Asked | None, here: Hardware) -> list[Check]:
    """GPUs, the target they make, and its driver."""
    names = ", ".join(f"{gpu.name} ({gpu.capability[0]}.{gpu.capability[1]})" for gpu in here.gpus)
    what = names or here.nvml_error or "none"
    found = "warning" if here.nvml_error else "ok"
    checks = [
        Check(
            "gpu",
            found,
            what,
            "run `nvidia-smi`; a container needs --gpus all" if here.nvml_error else "",
        )
    ]
    if asked is None:
        return [*checks, Check("target", "warning", "not checked", "correct the settings first")]
    try:
        target, choice = choose_target(asked.settings, asked, here)
        check_hardware(target, here)
    except NibbleError as error:
        return [*checks, Check("target", "fail", error.what, error.action)]
    checks.append(Check("target", "ok", f"{target.name}: {choice.reason}"))
    if target.device == "cuda":
        return [*checks, _driver_check(target, here)]
    return checks + ([_bandwidth_check(here.compute)] if here.compute else [])


def _bandwidth_check(cores: ComputeCores) -> Check:
    """What bounds decoding on a CPU. The doctor changes no file, so plans do not see it."""
    read = read_bandwidth(cores.threads) / 1e9
    what = f"{cores.threads} threads read {read:.1f} GB/s ({cores.reason})"
    return Check("cpu", "ok", what)


def _driver_check(target: Target, here: Hardware) -> Check:
    try:
        warnings = check_driver(target, here.driver)
    except NibbleError as error:
        return Check("driver", "fail", error.what, error.action)
    if warnings:
        return Check("driver", "warning", "; ".join(warnings), "install another driver")
    return Check("driver", "ok", f"{here.driver}, CUDA {here.cuda_driver}")


def memory_check(here: Hardware) -> Check:
    """Host memory within the cgroup."""
    available, total = gib(here.memory_available_bytes), gib(here.memory_total_bytes)
    what = f"{available} available of {total} (machine or cgroup limit)"
    if here.memory_available_bytes < LITTLE_MEMORY_BYTES:
        return Check(
            "memory", "warning", what, "stop other programs or raise the container's memory limit"
        )
    return Check("memory", "ok", what)


def _disk_checks(environ: Mapping[str, str]) -> list[Check]:
    """Size, free space and writability of the caches. Hugging Face's may be read-only when
    complete.
    """
    own, hub = cache_dir(environ), _hub(environ)
    checks = [folder_check("nibble cache", own, "NIBBLE_CACHE_DIR", "fail")]
    if hub is not None:
        checks.append(folder_check("hugging face cache", hub.cache, "HF_HOME", "warning"))
    return [*checks, folder_check("vllm cache", vllm_cache(environ), "VLLM_CACHE_ROOT", "fail")]


def folder_check(
    name: str, folder: Path, variable: str, when_read_only: Literal["warning", "fail"]
) -> Check:
    """Size and free space of a cache folder. For a folder that does not exist the check uses its
    parent.
    """
    existing = folder if folder.is_dir() else nearest_existing(folder)
    what = f"{folder}: {gib(folder_bytes(folder))} used, {gib(free_bytes(folder))} free"
    if problem := write_problem(existing):
        return Check(
            name,
            when_read_only,
            f"{what}; cannot write ({problem})",
            writable_fix(folder, variable),
        )
    if free_bytes(folder) < LITTLE_DISK_BYTES:
        return Check(name, "warning", what, f"free space or name another folder with {variable}")
    return Check(name, "ok", what)


def _port_checks(asked: Asked | None) -> list[Check]:
    if asked is None:
        return []
    settings = asked.settings
    wanted = (
        ("PORT", settings.host, settings.port),
        ("NIBBLE_CONTROL_PORT", "127.0.0.1", settings.control_port),
    )
    checks: list[Check] = []
    for variable, host, port in wanted:
        problem = bind_problem(host, port)
        what, fix = f"{host}:{port} is free", ""
        if problem:
            what, fix = (
                f"{host}:{port} is {problem}",
                f"stop the program that uses it (nibble?) or set {variable}",
            )
        checks.append(Check(variable, "warning" if problem else "ok", what, fix))
    return checks


def _hub(environ: Mapping[str, str]) -> Access | None:
    try:
        return access(environ)
    except NibbleError:  # reported by the token check
        return None


def _hub_checks(environ: Mapping[str, str]) -> list[Check]:
    """Whether the Hub answers, and whether a token is set; the token itself is never shown."""
    try:
        hub = access(environ)
    except NibbleError as error:
        return [Check("hf token", "fail", error.what, error.action)]
    token = Check(
        "hf token",
        "ok",
        "present" if hub.token else "absent: `nibble pull` cannot get gated and private models",
    )
    if hub.offline:
        return [
            Check("hub", "ok", "HF_HUB_OFFLINE is set: nibble serves only cached models"),
            token,
        ]
    return [hub_check(hub.address, _head), token]


def hub_check(endpoint: str, head: Callable[[str], str | None]) -> Check:
    """Whether the endpoint answers. Offline is a warning: cached and local models still serve."""
    if problem := head(endpoint):
        fix = (
            "check network, HTTPS_PROXY and HF_ENDPOINT, or serve a cached model with"
            " HF_HUB_OFFLINE=1"
        )
        return Check("hub", "warning", f"{endpoint} does not answer ({problem})", fix)
    return Check("hub", "ok", f"{endpoint} answers")


def _head(url: str) -> str | None:
    """Why a HEAD request fails, or None; an HTTP error status is an answer too."""
    import http.client
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, method="HEAD"), timeout=HUB_TIMEOUT_SECONDS
        ):
            return None
    except urllib.error.HTTPError as error:
        return None if error.code < 500 else f"HTTP {error.code}"
    except (
        OSError,
        ValueError,
        http.client.HTTPException,
    ) as error:  # the last: a port that is not a number
        return in_words(error)


def _key_check(environ: Mapping[str, str]) -> list[Check]:
    """The generated API key's file: readable by its owner alone, in the image by group 0 too."""
    path = cache_dir(environ) / KEY_FILE
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return []
    expected = secret_mode(path.parent)
    if mode & ~expected:
        return [
            Check(
                "api key file",
                "fail",
                f"{path} has mode {mode:04o}",
                f"run `chmod {expected:o} {path}`",
            )
        ]
    return [Check("api key file", "ok", f"{path} has mode {mode:04o}")]


def _limit_checks(here: Hardware) -> list[Check]:
    limit = open_files_limit()
    files = open_files_problem(limit)
    return [
        Check("open files", "warning" if files else "ok", files or f"up to {limit}"),
        shm_check(shm_free_bytes(), len(here.gpus)),
    ]


def shm_check(free_bytes: int | None, gpus: int) -> Check:
    """Shared memory for one worker and for several; only the plan knows how many a model uses."""
    name, what = "shared memory", f"/dev/shm has {(free_bytes or 0) // MIB} MiB free"
    if (free_bytes or 0) >= SEVERAL_WORKERS_BYTES:
        return Check(name, "ok", what)
    if (free_bytes or 0) < SMALL_QUEUES_BYTES:
        return Check(name, "warning", f"{what}: too little for a worker process", ADVICE)
    what += ": enough for one worker, too little for several"
    return Check(name, "warning" if gpus > 1 else "ok", what, ADVICE if gpus > 1 else "")
