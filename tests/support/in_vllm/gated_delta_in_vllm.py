"""`python gated_delta_in_vllm.py < JOBS`: answers of a vLLM on its CPU platform with nibble's gated
delta rule and of one without it, in one process.

JOBS is a JSON list of [folder, options of vllm.LLM]. For each there is a line with RESULT and JSON:
the largest difference of a log-probability as long as the answers agree, how many tokens of each
answer do, and for both the kernel's calls and how many layers have it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.support.in_vllm.agreement import agreement

# Longer than a step takes (chunks), and short.
PROMPTS = [[5 + (place * 7 + number % 2 * 31) % 100 for place in range(length)]
           for number, length in enumerate((3, 90, 40))]  # fmt: skip
TOKENS, MOST_TOKENS = 24, 2048


def on_the_cpu(plugin: Any, calls: dict[str, int]) -> None:
    """Let the plugin's code run where vLLM keeps the state transposed and has other operators."""
    import torch
    from vllm import _custom_ops
    from vllm.utils.torch_utils import _encode_layer_name

    # With AVX-512 vLLM would pack the weights that the kernel reads as they are.
    torch.cpu._is_avx512_bf16_supported = torch.cpu._is_amx_tile_supported = lambda: False
    _custom_ops._supports_onednn = False

    def counted(name: str) -> Any:
        kernel = getattr(plugin, name)

        def call(*given: Any, state: Any, **more: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            kernel(*given, state=state.transpose(-1, -2), **more)

        return call

    for name in ("gated_delta_step", "gated_delta_prompts"):
        KERNELS[name] = getattr(plugin, name)
        setattr(plugin, name, counted(name))

    def as_vllm(layer: Any, x: Any, qkvz: Any, out: Any) -> None:
        ba, _ = layer.in_proj_ba(x)
        qkv, z, b, a = layer.prepare_gdn_attention_core_inputs(qkvz, ba, len(x))
        name = _encode_layer_name(layer.prefix)
        torch.ops.vllm.cpu_gdn_attention_core(qkv, b, a, out, name)
        out.copy_(layer.norm(out.clone(), z))

    plugin._as_vllm = as_vllm
    plugin.runs_here = lambda: (True, None)
    plugin.LayerWithRule._warmup_prefill_kernels = lambda *given: None


def answers(folder: str, options: dict[str, Any], switch: str) -> tuple[list[Any], dict[str, Any]]:
    """`options` of vllm.LLM; most_tokens: those of a step with prompts that the kernel takes."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    from nibble.engine.plugin import gated_delta as plugin

    plugin.MOST_TOKENS = options.get("most_tokens", MOST_TOKENS)
    options = {name: value for name, value in options.items() if name != "most_tokens"}
    common = {
        "kv_cache_memory_bytes": 256 << 20,
        "max_logprobs": -1,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "additional_config": {"nibble": {"linear_attention": switch}},
    }
    CALLS.clear()
    llm = LLM(folder, **(common | options))
    sampling = SamplingParams(
        max_tokens=TOKENS, logprobs=-1, temperature=0, detokenize=False, ignore_eos=True
    )
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found = llm.generate(prompts, sampling, use_tqdm=False)
    executor: Any = llm.llm_engine.model_executor
    modules = executor.driver_worker.worker.model_runner.get_model().modules()
    layers = sum(isinstance(module, plugin._WithRule) for module in modules)
    checked = checks(executor.driver_worker.worker)
    about = {"calls": dict(CALLS), "layers": layers, "checks": checked}
    about["follows"] = switch == "on" and follows(executor.driver_worker.worker)
    del llm, executor, modules
    cleanup_dist_env_and_memory()
    return [output.outputs[0] for output in found], about


def checks(worker: Any) -> list[list[str]]:
    """What the canary says of each layer: with the kernels, and with one that doubles."""
    import torch

    from nibble.engine.plugin import gated_delta as plugin
    from nibble.engine.plugin.report.linear_attention import rule_results, rules_of

    def doubled(*given: Any, out: Any, **more: Any) -> None:
        KERNELS["gated_delta_prompts"](*given, out=out, **more)
        out.mul_(2)

    used, found = {name: getattr(plugin, name) for name in KERNELS}, []
    for kernels in (KERNELS, KERNELS | {"gated_delta_prompts": doubled}):
        for name, kernel in kernels.items():
            setattr(plugin, name, kernel)
        with torch.inference_mode():
            for layer in rules_of(worker.model_runner.get_model()):
                results = rule_results(*layer, torch.device("cpu"))
                found.append([result.problem for result in results])
    for name, kernel in used.items():
        setattr(plugin, name, kernel)
    return found


def follows(worker: Any) -> bool:
    """Whether the kernels' numbers are the layers' after weights are loaded again."""
    import torch

    from nibble.engine.plugin import gated_delta as plugin

    model, same = worker.model_runner.get_model(), []
    with torch.inference_mode():
        places = [rule.dt_bias.data_ptr() for _, rule in rules(model)]
        for layer, _ in rules(model):
            layer.dt_bias.data.add_(1)
        plugin.replace_layers(model, worker.vllm_config)
        for (layer, rule), place in zip(rules(model), places, strict=True):
            same.append(rule.dt_bias.equal(layer.dt_bias.float()))
            same.append(rule.dt_bias.data_ptr() == place)
    return all(same)


def rules(model: Any) -> list[tuple[Any, Any]]:
    from nibble.engine.plugin import gated_delta as plugin

    return [(one, rule) for one in plugin.layers_of(model) if (rule := plugin.rule_of(one))]


def compared(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    ours, about = answers(folder, options, "on")
    theirs, about_others = answers(folder, options, "off")
    largest, same = agreement(ours, theirs)
    return {"largest": largest, "same_tokens": same, "on": about, "off": about_others}


CALLS: dict[str, int] = {}
KERNELS: dict[str, Any] = {}  # without the counter

if __name__ == "__main__":
    from nibble.engine.plugin import gated_delta

    on_the_cpu(gated_delta, CALLS)
    for job in json.load(sys.stdin):
        print("\nRESULT " + json.dumps(compared(*job)), flush=True)
