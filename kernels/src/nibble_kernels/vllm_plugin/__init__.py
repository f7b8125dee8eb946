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
"""

from __future__ import annotations

import functools

__all__ = ["register"]


@functools.cache
def register() -> None:
    """Put nibble's classes in place. Called once in each process, before any layer is made."""
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as compressed_tensors_moe,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w4a4_nvfp4 as compressed_tensors_linear,
    )

    from nibble_kernels.vllm_plugin import (
        cloverlm,
        cpu_rope,
        cpu_router,
        dense,
        kernels,
        lm_head,
        moe,
        mtp,
        neighbours,
        pulse,
        quartet2,
        queues,
        router_bias,
        whole_load,
    )

    cloverlm.register_cloverlm()
    quartet2.register_quartet2()
    kernels.register_cpu_kernel()
    # setattr: names these modules import for themselves.
    for module in (modelopt, compressed_tensors_linear):
        setattr(module, "init_nvfp4_linear_kernel", kernels.nvfp4_linear_kernel)  # noqa: B010

    modelopt.LINEAR_METHOD_BUILDERS |= dense.modelopt_builders()
    setattr(compressed_tensors, "CompressedTensorsW4A4Fp4", dense.CompressedTensorsW4A4Fp4)  # noqa: B010

    modelopt_moe, compressed_moe = moe.methods()
    modelopt.ModelOptNvFp4FusedMoE = modelopt_moe
    modelopt.ModelOptNvFp4Config.FusedMoEMethodCls = modelopt_moe
    compressed_tensors_moe.CompressedTensorsW4A4Nvfp4MoEMethod = compressed_moe

    lm_head.register_head()
    mtp.register_draft_projection()
    neighbours.follow_loading()
    pulse.register()
    queues.size_answer_queue()
    router_bias.load_router_biases()
    cpu_router.add_biases()
    cpu_rope.rotate_heads_apart()
    whole_load.check_loads()
