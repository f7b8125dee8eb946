"""nibble's decode attention in vLLM, with the option attention_kernel.

- backend.py: the backend CUTE_PAGED. FlashAttention's builder, metadata and kernels, but nibble's
  kernel for batches of decode steps.
- workspace.py: memory that all layers of a device share.
- follow.py: registers the backend in vLLM's workers.
"""
