"""nibble's kernels as torch operators, nibble::…: compiled C++ and CUDA where the wheel has them,
plain torch elsewhere.

    from nibble_kernels.activation_quant import nvfp4_quant

Importing an operation's module registers its operators; every one works on every device, at the
speed of what is there.
"""

from __future__ import annotations

__all__ = ["implementations"]


def implementations() -> dict[str, str]:
    """For each kind of device, "compiled" or the reason why the plain torch code computes there."""
    from nibble_kernels.library import load

    return dict(load())
