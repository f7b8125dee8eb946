"""Replaces classes and functions of vLLM by the plugin's."""

from __future__ import annotations

from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as compressed_tensors_moe,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_nvfp4 as compressed_tensors_linear,
)

from nibble.engine.plugin import (
    chain_layers,
    cloverlm,
    compact_json,
    cpu_cache,
    cpu_decoder,
    cpu_draws,
    cpu_greedy,
    cpu_head,
    cpu_leading,
    cpu_logprobs,
    cpu_mapped,
    cpu_pages,
    cpu_penalties,
    cpu_process,
    cpu_rope,
    cpu_router,
    cpu_seeds,
    cpu_step,
    cpu_top_p,
    dense,
    draft_head,
    e4m3,
    e4m3_linear,
    fuse_silu,
    gated_delta,
    kernels,
    lm_head,
    moe,
    mtp,
    pulse,
    quartet2,
    queues,
    router_bias,
    whole_load,
)
from nibble.engine.plugin.attention import front
from nibble.engine.plugin.attention.follow import offer_attention
from nibble.engine.plugin.require import replace, required
from nibble.engine.plugin.router import follow as routers
from nibble.engine.plugin.step_graph.follow import follow_workers


def install() -> None:
    """Install all parts of the plugin. Raises VllmMismatch."""
    cloverlm.register_cloverlm()
    quartet2.register_quartet2()
    kernels.register_cpu_kernel()
    _install_linear()
    _install_experts()
    lm_head.register_head()
    mtp.register_draft_projection()
    draft_head.follow_workers()
    fuse_silu.follow_loading()
    chain_layers.follow_loading()
    routers.follow_loading()
    pulse.register()
    queues.size_answer_queue()
    queues.sleep_between_looks()
    router_bias.load_router_biases()
    cpu_router.add_biases()
    cpu_rope.rotate_heads_apart()
    cpu_cache.take_pages_beside_the_start()
    cpu_decoder.follow_loading()
    cpu_draws.draw_with_few_exponentials()
    cpu_greedy.compare_in_vectors()
    cpu_head.read_heads_as_stored()
    cpu_leading.follow_loading()
    cpu_logprobs.count_without_compiler()
    cpu_mapped.give_read_pages_back()
    cpu_pages.use_large_pages()
    cpu_penalties.change_few_logits()
    cpu_process.compute_in_the_engine()
    cpu_seeds.keep_generators()
    cpu_step.shorten_steps()
    cpu_top_p.sort_few_logits()
    whole_load.check_loads()
    compact_json.forbid_blanks()
    offer_attention()
    front.follow_loading()
    gated_delta.follow_loading()
    follow_workers()


def _install_linear() -> None:
    """Replace the names in the namespaces of the modules that import them."""
    for module in (modelopt, compressed_tensors_linear):
        replace(module, "init_nvfp4_linear_kernel", kernels.nvfp4_linear_kernel, "use_a16")
    required(modelopt, "LINEAR_METHOD_BUILDERS").update(dense.modelopt_builders())
    replace(compressed_tensors, "CompressedTensorsW4A4Fp4", dense.CompressedTensorsW4A4Fp4)
    e4m3_linear.follow_kernels()


def _install_experts() -> None:
    modelopt_moe, compressed_moe = moe.methods()
    replace(modelopt, "ModelOptNvFp4FusedMoE", modelopt_moe)
    replace(modelopt.ModelOptNvFp4Config, "FusedMoEMethodCls", modelopt_moe)
    replace(compressed_tensors_moe, "CompressedTensorsW4A4Nvfp4MoEMethod", compressed_moe)
    e4m3.install_experts()
