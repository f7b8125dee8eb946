"""nibble's kernels as torch operators, nibble::…: compiled C++ and CUDA where the wheel has them, plain torch elsewhere.

    from nibble_kernels.nvfp4_quant import nvfp4_quant

Importing an operation's module registers its operators; every one works on every device, at the speed of what is there.
"""

from nibble_kernels.library import implementations

__all__ = ["implementations"]
