"""FlashAttention 2 is PTX to every GPU from SM90 on: what the driver makes of it at the first
start must be kept.
"""

from __future__ import annotations

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="N21",
    title=(
        "FlashAttention 2 has sm_80 code and PTX only: compiled by the driver at each first start"
        " in a new container"
    ),
    how="fat binary: what each object of _vllm_fa2_C is built for",
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "defect"},
    verdict=(
        "All objects are sm_80 machine code and compute_80 PTX, which SM90, SM100 and SM12x compile"
        " when first used. The driver keeps the result in ~/.nv, which a container loses."
    ),
    instead=(
        "keeps the driver's cache in the cache volume (CUDA_CACHE_PATH) with room for it"
        " (CUDA_CACHE_MAXSIZE)"
    ),
    fix=Fix(
        "environment", "targets/*.toml CUDA_CACHE_MAXSIZE, docker/Dockerfile.* CUDA_CACHE_PATH"
    ),
    references=(
        "vllm 0.32 vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        "CUDA C++ Programming Guide: CUDA_CACHE_MAXSIZE",
    ),
)
MODULE = "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"
TARGETS = ("gb10", "sm120", "b200", "hopper")
ENOUGH_BYTES = 1 << 30


def probe(tree: Tree) -> Finding:
    """Which GPUs load FlashAttention 2 as PTX only."""
    from nibble.engine.fatbin import gpu_objects
    from nibble.machine.targets import load_target

    if not tree.has(MODULE):
        return not_applicable("no FlashAttention 2 in this tree")
    codes = sorted({code for one in gpu_objects(tree.path(MODULE)) for code in one.codes})
    from_ptx = []
    for name in TARGETS:
        runs = [code for code in codes if code.runs_on(load_target(name).capabilities[0])]
        if runs and all(code.is_ptx for code in runs):
            from_ptx.append(name)
    detail = f"built for {', '.join(map(str, codes))}"
    return defect(f"{detail}: PTX on {', '.join(from_ptx)}") if from_ptx else sound(detail)


def remedy(tree: Tree) -> Finding:
    """Every target gives the driver's cache room, and every image keeps it in the volume."""
    from nibble.machine.paths import root
    from nibble.machine.targets import load_target

    small = [
        name
        for name in TARGETS
        if "CUDA_CACHE_MAXSIZE" not in load_target(name).env
        or int(load_target(name).env["CUDA_CACHE_MAXSIZE"].value) < ENOUGH_BYTES
    ]
    files = [root() / f"docker/Dockerfile.{name}" for name in TARGETS]
    lost = [
        path.name
        for path in files
        if path.is_file() and "CUDA_CACHE_PATH=/var/cache/nibble/" not in path.read_text()
    ]
    if small or lost:
        return defect(f"no room or no place for the cache: {', '.join(small + lost)}")
    return sound(
        f"CUDA_CACHE_MAXSIZE of at least {ENOUGH_BYTES >> 30} GiB in every target; the cache lies"
        " in the volume"
    )
