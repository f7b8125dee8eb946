"""nibble's vLLM plugin. vLLM loads it in each of its processes.

- dense.py, moe.py, lm_head.py, mtp.py: subclasses of vLLM's NVFP4 methods. They merge global scales
  exactly, refuse scales that were not loaded, keep activations in BF16 on request, and load a
  quantized lm_head in every model.
- draft_head.py: an NVFP4 copy of the output head for the drafter.
- cpu.py, cuda.py, w4a4.py, kernels.py, fuse_silu.py: nibble's kernels as vLLM layers.
- e4m3.py, e4m3_linear.py: nibble's kernels for FP8 experts and linear layers.
- chain_layers.py: residual sums in products, and norms that let the next product begin early.
- plain_decoders.py: the families that chain_layers.py and cpu_decoder.py know.
- gated_delta.py: linear attention with the gated delta rule in few launches.
- loaded_models.py: what changes of loaded models share.
- router: a router of experts, and the norm in front of it, as one kernel.
- shared_expert.py: a shared expert as one more of the routed ones.
- cloverlm, tokenmonster, quartet2.py: CloverLM, which vLLM does not have.
- router_bias.py, cpu_router.py, cpu_rope.py: fixes of routers and of RoPE.
- cpu_seeds.py: requests with a seed on the CPU.
- cpu_step.py: decode steps on the CPU that are one operator.
- cpu_cache.py: the KV cache's memory on the CPU, taken beside the start.
- cpu_greedy.py: the largest logit on the CPU.
- cpu_draws.py, cpu_penalties.py, cpu_top_p.py: sampling on the CPU that computes for few tokens.
- cpu_logprobs.py: ranks of tokens on the CPU without a compiler.
- cpu_pages.py: weights in large pages on the CPU.
- memory_advice.py: madvise, which the CPU's modules share.
- cpu_mapped.py: the pages of mapped files on the CPU, given back while a model loads.
- compact_json.py: JSON without blanks between its values.
- whole_load.py, written.py: end a load that leaves a weight unwritten.
- pulse.py: reports the progress of each process to nibble's supervisor.
- queues.py: sets the size of the queue of a worker's answers.
- attention: nibble's kernels for the attention of decode steps, and for what comes before it.
- step_graph: decode steps from CUDA graphs.

vLLM 0.32 looks the classes up in its modules when it builds a layer. They keep vLLM's names,
because some of its code checks a name (gpt_oss.py:349, linear.py:528).

The entry point is `nibble` in the group `vllm.general_plugins`. vLLM only logs an error of this
import (vllm 0.32 plugins/__init__.py:71), but an error of `register` ends its process: this module
imports nothing that can fail.
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
    """Install nibble's classes in vLLM, once per process and before any layer is built.

    Raises VllmMismatch if vLLM lacks a name that they need.
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
    """Silence the operators' warning about plain torch code under nibble's supervisor, which warns
    once, from the workers' reports.
    """
    if os.environ.get(REPORT_FOLDER):
        logging.getLogger(f"{OPERATORS}.library").setLevel(logging.ERROR)


def has_operators() -> bool:
    """Whether nibble-kernels is installed. Without it the plugin changes nothing."""
    return find_spec(OPERATORS) is not None
