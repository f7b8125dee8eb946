"""nibble's vLLM plugin, loaded by vLLM in each of its processes (entry point `nibble` of
`vllm.general_plugins`).

It puts subclasses in the place of vLLM's NVFP4 methods, which merge global scales exactly, refuse
scales that were not loaded, take activations as asked, load a quantized lm_head in every model, and
serve NVFP4 on the CPU; it adds CloverLM, which vLLM does not have; it loads router biases that are
stored beside the experts (router_bias.py), adds a router's bias on the CPU (cpu_router.py), rotates
queries with a dimension for heads there (cpu_rope.py) and ends a load that leaves a weight
unwritten (whole_load.py); it tells nibble's supervisor how far each process is (pulse.py) and sizes
the queue of a worker's answers (queues.py). vLLM 0.32 looks the classes up in these modules when it
makes a layer; they keep vLLM's names because some of its code asks for a name (gpt_oss.py:349,
linear.py:528).

vLLM only logs an error of this import (vllm 0.32 plugins/__init__.py:71), and one of `register`
ends its process: this module imports nothing that may fail.
"""

from __future__ import annotations

import functools
import logging
import os
from importlib.util import find_spec

from nibble.engine.contract import OPERATORS, REPORT_FOLDER

__all__ = ["has_operators", "register"]


@functools.cache
def register() -> None:
    """Put nibble's classes in place. Called once in each process, before any layer is made.
    Raises VllmMismatch for a vLLM that lacks what they need.
    """
    if not has_operators():
        logging.getLogger(f"vllm.{__name__}").warning(
            "nibble-kernels is not installed: nibble's plugin does nothing"
        )
        return
    from nibble.engine.plugin.require import names_of_vllm

    quiet_operators()
    with names_of_vllm():
        from nibble.engine.plugin.install import install
    install()


def quiet_operators() -> None:
    """Under nibble's supervisor the operators do not warn that plain torch computes: it does so
    once, from the workers' reports.
    """
    if os.environ.get(REPORT_FOLDER):
        logging.getLogger(f"{OPERATORS}.library").setLevel(logging.ERROR)


def has_operators() -> bool:
    """Whether nibble-kernels is installed; without it the plugin leaves vLLM as it is."""
    return find_spec(OPERATORS) is not None
