"""`python chained_in_vllm.py FOLDER OPTIONS`: the canary's comparisons of a vLLM's chained decoder
layers, and how a layer answers while its parts have hooks. OPTIONS are vllm.LLM's, in JSON.

A line with RESULT and JSON: the names of the compared layers, their problems, those with a wrong
norm before attention and those with a wrong stream for the next layer, the dtypes of what was
compared, the largest difference of a layer's result with hooks from that without, over its size,
with the parts whose hooks were called, and when a layer computes the next one's queries.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PARTS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def findings(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    import torch
    from vllm import LLM

    from nibble.engine.plugin.report.chained import chained_layers, chained_results

    llm = LLM(folder, skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20, **options)
    executor: Any = llm.llm_engine.model_executor
    model = executor.driver_worker.worker.model_runner.get_model()
    layers: list[Any] = list(chained_layers(model))
    seen: list[str] = []

    def compared(name: str, layer: Any) -> list[str]:
        with torch.inference_mode():
            found = list(chained_results(name, layer, torch.device("cpu")))
        return [result.problem for result in found]

    name, layer = layers[0]
    hook = layer.input_layernorm.register_forward_pre_hook(
        lambda _module, args: seen.append(str(args[0].dtype))
    )
    right = compared(name, layer)
    hook.remove()
    fused = layer.normed_qkv
    layer.normed_qkv = lambda x: fused(x) * 1.05
    wrong = compared(name, layer)
    del layer.normed_qkv
    onward = layer.up_to_next_attention

    def wrong_stream(stream: torch.Tensor, attended: torch.Tensor) -> Any:
        after, qkv = onward(stream, attended)
        return after * 1.05, qkv

    layer.up_to_next_attention = wrong_stream
    wrong_next = compared(name, layer)
    del layer.up_to_next_attention
    return {
        "layers": [name for name, _ in layers],
        "right": right,
        "wrong": wrong,
        "wrong_next": wrong_next,
        "dtypes": sorted(set(seen)),
        **watched(layer),
    }


def watched(layer: Any) -> dict[str, Any]:
    """Attention is left out: it needs a step's metadata."""
    import torch

    class Attention(torch.nn.Module):
        def __init__(self, known: Any) -> None:
            super().__init__()
            self.qkv_proj, self.o_proj = known.qkv_proj, known.o_proj

        def forward(self, positions: Any, hidden_states: Any) -> Any:
            qkv, _ = self.qkv_proj(hidden_states)
            output, _ = self.o_proj(qkv[:, : self.o_proj.layer.input_size].contiguous())
            return output

    layer.self_attn = Attention(layer.self_attn)
    x = torch.randn(7, len(layer.input_layernorm.weight)).to(layer.input_layernorm.weight.dtype)
    called: list[str] = []
    with torch.inference_mode():
        without, _ = layer(None, x)
        hooks = [
            layer.get_submodule(part).register_forward_pre_hook(
                lambda _module, _args, part=part: called.append(part)
            )
            for part in PARTS
        ]
        with_hooks, _ = layer(None, x)
        for hook in hooks:
            hook.remove()
        again, next_qkv = layer(None, x)
        (following,) = layer.following
        expected = following.normed_qkv(again)
        leads_on = {"without hooks": next_qkv is not None and torch.equal(next_qkv, expected)}
        hooked = {"its": layer, "the next one's": following, "a part's": following.mlp}
        for name, module in hooked.items():
            hook = module.register_forward_pre_hook(lambda _module, _args: None)
            leads_on[name] = layer(None, x)[1] is not None
            hook.remove()
        layer.model[0].aux_hidden_state_layers = (1,)
        leads_on["a drafter"] = layer(None, x)[1] is not None
        layer.model[0].aux_hidden_state_layers = ()
    difference = (with_hooks.float() - without.float()).norm() / without.float().norm()
    return {
        "difference": float(difference),
        "called": called,
        "again": bool(torch.equal(again, without)),
        "leads_on": leads_on,
    }


if __name__ == "__main__":
    folder, options = sys.argv[1:]
    print("\nRESULT " + json.dumps(findings(folder, json.loads(options))), flush=True)
