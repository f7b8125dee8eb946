"""`python shared_expert_in_vllm.py FOLDER OPTIONS`: the canary's comparisons of a vLLM's shared
experts that the routed ones' kernel computes. OPTIONS are vllm.LLM's, in JSON.

A line with RESULT and JSON: for each layer, what the comparisons say of the layer as it is, with a
global scale that doubled, and once the layer has taken its scales again.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def problems(folder: str, options: dict[str, Any]) -> list[list[list[str]]]:
    import torch
    from vllm import LLM
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    from nibble.engine.plugin.report.shared_expert import shared_results
    from nibble.engine.plugin.shared_expert import joined

    llm = LLM(folder, skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20, **options)
    executor: Any = llm.llm_engine.model_executor
    model = executor.driver_worker.worker.model_runner.get_model()
    runners: list[Any] = [module for module in model.modules() if isinstance(module, MoERunner)]

    def compared(runner: Any) -> list[str]:
        with torch.inference_mode():
            expert = joined(runner)
            assert expert is not None
            routed, dtypes = runner.routed_experts.forward_modular, set[torch.dtype]()

            def seen(**given: Any) -> Any:
                dtypes.add(given["x"].dtype)
                return routed(**given)

            runner.routed_experts.forward_modular = seen
            found = shared_results(runner.layer_name, runner, expert, torch.device("cpu"))
            problems = [result.problem for result in found]
            runner.routed_experts.forward_modular = routed
            assert dtypes == {torch.bfloat16}, dtypes  # the kernels for GPUs take no other
            return problems

    found = []
    for runner in runners:
        expert: Any = joined(runner)
        said = [compared(runner)]
        expert._w2._global_scales *= 2
        said.append(compared(runner))
        expert.follow()
        found.append([*said, compared(runner)])
    return found


if __name__ == "__main__":
    folder, options = sys.argv[1:]
    print("\nRESULT " + json.dumps(problems(folder, json.loads(options))), flush=True)
