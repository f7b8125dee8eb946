"""nibble's vLLM plugin for probes, with the operators of this checkout's sources where there are
any, else of the installed package.
"""

from __future__ import annotations

import sys
from types import ModuleType

from nibble.machine.paths import root


def plugin_layers() -> ModuleType:
    """nibble.engine.plugin.layers: what the plugin does to a layer's tensors. It imports
    torch and nothing of vLLM.
    """
    find_nibble_kernels()
    from nibble.engine.plugin import layers

    return layers


def find_nibble_kernels() -> None:
    """Make nibble_kernels importable."""
    sources = root() / "kernels/src"
    if sources.is_dir() and str(sources) not in sys.path:
        sys.path.insert(0, str(sources))


def become_cpu() -> None:
    """Have the tree's vLLM run on its CPU platform, whatever it was built for. Comes before
    anything else of vllm is imported.
    """
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms.current_platform = CpuPlatform()
