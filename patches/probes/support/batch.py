"""The tokens and sequences a tree's vLLM schedules at once by default."""

from __future__ import annotations

from types import SimpleNamespace

from nibble.engine.patching.tree import Tree
from probes.support.fake_cuda import DEVICES
from probes.support.syntax import Sources

METHOD = "vllm.engine.arg_utils.EngineArgs.get_batch_defaults"


def server_defaults(tree: Tree, capability: tuple[int, int]) -> tuple[int, int] | None:
    """(max_num_batched_tokens, max_num_seqs) of `vllm serve` on one GPU, by the tree's own code;
    None where it has none.
    """
    name, _, memory = DEVICES[capability]
    platform = SimpleNamespace(
        get_device_total_memory=lambda: int(memory),
        get_device_name=lambda: name,
        is_device_capability=lambda asked: asked == capability,
        is_tpu=lambda: False,
        is_cpu=lambda: False,
        is_xpu=lambda: False,
        is_rocm=lambda: False,
    )
    sources = Sources(tree, {"vllm.platforms.current_platform": platform})
    if not sources.has(METHOD):
        return None
    context = sources.load("vllm.usage.usage_lib.UsageContext").OPENAI_API_SERVER
    tokens, sequences = sources.load(METHOD)(None, 1)
    return tokens[context], sequences[context]
