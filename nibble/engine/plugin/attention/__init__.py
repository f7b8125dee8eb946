"""nibble's attention in vLLM: decode steps with the option attention_kernel, and what comes before
them with the option attention_front.

- backend.py: the backend CUTE_PAGED. FlashAttention's builder, metadata and kernels, but nibble's
  kernel for batches of decode steps.
- workspace.py: memory that all layers of a device share.
- follow.py: registers the backend in vLLM's workers.
- front.py: norms of queries and keys, RoPE and the cache write as one kernel.
"""
