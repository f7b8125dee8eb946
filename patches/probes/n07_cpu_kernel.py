"""An NVFP4 linear layer must find a kernel on the CPU platform: the emulation is written to be
always available.
"""

from __future__ import annotations

from types import SimpleNamespace

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support.syntax import Sources

LINEAR = "vllm.model_executor.kernels.linear"
ROW = Row(
    id="N7",
    title="NVFP4 models cannot run on a CPU",
    how="the tree's init_nvfp4_linear_kernel on its CPU platform",
    expect={"0.32.0": "defect"},
    verdict=(
        "The table of NVFP4 kernels has no row for the CPU, though EmulationNvFp4LinearKernel"
        " claims to be the last resort anywhere."
    ),
    instead=(
        "nibble's vLLM plugin registers a kernel for dense layers, W4A4 and W4A16, and a"
        " method for experts."
    ),
    fix=Fix("plugin", "nibble.engine.plugin.kernels.register_cpu_kernel"),
    references=(
        "vllm 0.32 model_executor/kernels/linear/__init__.py:574",
        "vllm-project/vllm#45779",
    ),
)


def probe(tree: Tree) -> Finding:
    """Ask for a kernel for a W4A4 layer."""
    sources = on_cpu(tree)
    if not sources.has(f"{LINEAR}.init_nvfp4_linear_kernel"):
        return not_applicable("NVFP4 kernels are not chosen from a table in this tree")
    try:
        kernel = sources.load(f"{LINEAR}.init_nvfp4_linear_kernel")()
    except ValueError as error:
        return defect(" ".join(str(error).split()))
    return sound(f"the CPU runs NVFP4 layers with {type(kernel).__name__}")


def remedy(tree: Tree) -> Finding:
    """Ask the tree again once nibble's plugin has registered its kernel: for W4A4 and for
    weights alone.
    """
    from probes.support import plugin

    plugin.become_cpu()
    plugin.find_nibble_kernels()
    from nibble.engine.plugin import kernels

    kernels.register_cpu_kernel()
    try:
        found = {type(kernels.nvfp4_linear_kernel(use_a16)).__name__ for use_a16 in (False, True)}
    except ValueError as error:
        return defect(" ".join(str(error).split()))
    return sound(f"the CPU runs NVFP4 layers with {', '.join(sorted(found))}")


def on_cpu(tree: Tree) -> Sources:
    """The tree where vLLM runs on its CPU platform."""
    envs = SimpleNamespace(VLLM_BATCH_INVARIANT=False, VLLM_DISABLED_KERNELS=[])
    given = {"vllm.envs": envs, "vllm.config.get_current_vllm_config_or_none": lambda: None}
    sources = Sources(tree, given)
    platform = sources.load("vllm.platforms.cpu.CpuPlatform")
    sources.given["vllm.platforms.current_platform"] = platform()
    return sources
