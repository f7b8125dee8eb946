"""nibble's kernels as torch operators, nibble::…: compiled C++ and CUDA if the wheel has them, else
plain torch.

    from nibble_kernels.activation_quant import nvfp4_quant

Importing a module registers its operators. Every operator works on every device, with a compiled
kernel or with plain torch code.
"""

from __future__ import annotations

__all__ = ["implementations"]


def implementations() -> dict[str, str]:
    """Device type -> "compiled", or the reason why it uses the plain torch code."""
    from nibble_kernels.library import load

    return dict(load())
