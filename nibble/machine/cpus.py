"""The CPU cores that a model's products may use: what affinity, cgroup quota, NUMA nodes and kinds
of cores leave of the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nibble.machine.cgroups import cgroups

_QUOTAS = ("cpu.max", "cpu.cfs_quota_us")
# Of the fastest core's capacity. Products are divided equally, so a slower core holds up the rest.
_FAST = 0.75


@dataclass(frozen=True)
class ComputeCores:
    """`cpus` are the logical CPUs of the chosen cores, SMT siblings included.

    `threads` is one for each physical core, at most the cgroup's quota. `reason` says what was
    left out.
    """

    cpus: tuple[int, ...]
    threads: int
    reason: str
    numa_nodes: int = 1  # with usable cores; the threads are those of one


def compute_cores(root: Path = Path("/"), allowed: Iterable[int] | None = None) -> ComputeCores:
    """Those of this process. `allowed`: its logical CPUs, by default its affinity.

    One NUMA node, since vLLM keeps a worker's memory on one (vllm 0.32 v1/worker/cpu_worker.py:52);
    of cores with different speeds the fast ones.
    """
    usable = set(os.sched_getaffinity(0) if allowed is None else allowed)
    system = root / "sys/devices/system"
    cores = _cores(usable, system)
    notes: list[str] = []
    of_nodes = _by_node(cores, system)
    node = max(of_nodes, key=len, default=[]) or cores
    if len(node) < len(cores):
        notes.append(f"on one NUMA node of {len(cores)}")
    fast = _fast(node, system, root)
    if len(fast) < len(node):
        notes.append(f"the fast ones of {len(node)}")
    count = len(fast)
    threads, quota = count, cpu_quota(root)
    if quota is not None and quota < count:
        threads = max(1, int(quota + 0.5))
        notes.append(f"of which the cgroup's quota gives {quota:g}")
    what = f"{count} physical core{'s' * (count != 1)}"
    cpus = tuple(sorted(cpu for core in fast for cpu in core))
    return ComputeCores(cpus, threads, ", ".join((what, *notes)), max(1, len(of_nodes)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the tightest cgroup gives this process; None: no limit."""
    quotas = [_quota(folder) for folder in cgroups("cpu", _QUOTAS, root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(folder: Path) -> float | None:
    limit, _, period = _text(folder / "cpu.max").partition(" ")
    if not limit:
        limit, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    if not (limit.isdigit() and period.isdigit() and int(period)):  # "max", -1, or no file
        return None
    return int(limit) / int(period)


def _cores(usable: set[int], system: Path) -> list[frozenset[int]]:
    """The usable logical CPUs of each physical core."""
    found: dict[int, frozenset[int]] = {}
    for cpu in sorted(usable):
        topology = system / f"cpu/cpu{cpu}/topology"
        text = _text(topology / "core_cpus_list") or _text(topology / "thread_siblings_list")
        core = frozenset(_cpu_list(text) & usable) or frozenset({cpu})
        found.setdefault(min(core), core)
    return list(found.values())


def _by_node(cores: list[frozenset[int]], system: Path) -> list[list[frozenset[int]]]:
    """The cores of each NUMA node that has some."""
    nodes = [_cpu_list(_text(path)) for path in sorted(system.glob("node/node*/cpulist"))]
    return list(filter(None, ([core for core in cores if core & node] for node in nodes)))


def _fast(cores: list[frozenset[int]], system: Path, root: Path) -> list[frozenset[int]]:
    """Arm tells capacities of its cores; x86 lists those that are not efficient cores."""
    performance = _cpu_list(_text(root / "sys/devices/cpu_core/cpus"))
    if performance:
        return [core for core in cores if core & performance] or cores
    texts = [_text(system / f"cpu/cpu{min(core)}/cpu_capacity") for core in cores]
    if not all(text.isdigit() for text in texts):
        return cores
    least = _FAST * max(map(int, texts), default=0)
    return [core for core, text in zip(cores, texts, strict=True) if int(text) >= least]


def _cpu_list(text: str) -> set[int]:
    """The kernel's form: 0-3,8."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
