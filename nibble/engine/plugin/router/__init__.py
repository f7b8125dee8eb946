"""Routers of experts by nibble's kernels, in models that nibble's GPU kernels compute.

- follow.py: fuses them when a model is loaded.
- gate.py: the gate's product, the scores and the choice as one kernel.
- norm.py: the norm in front of the gate, in the same kernel.
"""
