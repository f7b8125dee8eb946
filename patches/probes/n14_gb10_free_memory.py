"""vLLM starts only where its share of all memory is free at once; GB10 shares that memory with the
host.

The check is all or nothing (vllm 0.32 v1/worker/utils.py:716-772) and nothing limits the process
afterwards.
"""

from __future__ import annotations

from types import SimpleNamespace

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from nibble.machine.hardware import Gpu, Hardware
from nibble.plan import gather as prepare
from probes.support.plans import plan
from probes.support.syntax import Sources

GIB = 1 << 30
TOTAL_BYTES = int(121.69 * GIB)  # what vLLM sees of a GB10
KV_BYTES = 70 * GIB
FREE_BYTES = 101 * GIB  # reported free on Sparks in use: 101 to 102 GiB (patches.md N14)
CHECK = "vllm.v1.worker.utils.request_memory"
DEFAULT = "vllm.config.cache.CacheConfig.gpu_memory_utilization"

ROW = Row(
    id="N14",
    title="On GB10 vLLM's default share of memory is more than is free, so it does not start",
    how="the tree's own request_memory with a GB10's numbers",
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "defect"},
    verdict=(
        "The default share of 121.69 GiB is 109.5 GiB (0.9) up to 0.16.0 and 112.0 GiB (0.92) in"
        " 0.32.0, of 101 to 102 GiB free. It is a check at start: nothing bounds the profile run or"
        " what the process takes later, and psutil does not see a cgroup's limit."
    ),
    instead=(
        "The memory budget: KV cache in bytes and a fraction that passes, both from what is"
        " available less a reserve; a fraction that a user or a recipe gives is a cap. What would"
        " not fit is refused before the load, and a watchdog stops the engine before the reserve is"
        " gone."
    ),
    fix=Fix("flag", "nibble/plan/memory.py gpu-memory-utilization, kv-cache-memory-bytes"),
    references=(
        "vllm 0.32 v1/worker/utils.py:753",
        "vllm 0.32 config/cache.py:102",
        "vllm-project/vllm#46307",
        "#56824",
    ),
)


def probe(tree: Tree) -> Finding:
    """Ask the tree's check with its own default."""
    sources = Sources(tree)
    if not (tree.has("vllm/v1/worker/utils.py") and sources.has(CHECK)):
        return not_applicable("no v1.worker.utils.request_memory")
    return _start(sources, sources.load(DEFAULT).default)


def remedy(tree: Tree) -> Finding:
    """The same with the share of nibble's plan on such a machine, where 0.9 and a large KV cache
    are asked for.
    """
    gb10 = Gpu(0, "NVIDIA GB10", (12, 1), None, None, "")
    prepare.detect = lambda environ: Hardware(
        (gb10,), None, None, "aarch64", 20, frozenset(), TOTAL_BYTES, FREE_BYTES
    )
    asked = plan("gb10", GPU_MEMORY_UTIL="0.9", NIBBLE_KV_CACHE_BYTES=str(KV_BYTES)).args
    return _start(Sources(tree), float(asked["--gpu-memory-utilization"].value))


def _start(sources: Sources, share: float) -> Finding:
    snapshot = SimpleNamespace(total_memory=TOTAL_BYTES, free_memory=FREE_BYTES, device_="cuda:0")
    what = f"{share} of {TOTAL_BYTES / GIB:.2f} GiB with {FREE_BYTES / GIB:.0f} GiB free"
    try:
        requested = sources.load(CHECK)(snapshot, SimpleNamespace(gpu_memory_utilization=share))
    except ValueError:
        return defect(f"{what}: refuses to start, {TOTAL_BYTES * share / GIB:.2f} GiB wanted")
    return sound(f"{what}: starts with {requested / GIB:.2f} GiB")
