"""--step-graph: whether decode steps run from CUDA graphs. Pure.

The vLLM plugin gets `on`, or no value, which means vLLM's path. What only a loaded engine knows,
such as its attention backend, the plugin decides (engine/plugin/step_graph/facts.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.layers import layers
from nibble.engine.step_graph_memory import prompt_graph_bytes, step_graph_bytes
from nibble.plan.choice import Choice, values_of
from nibble.plan.draft_head import draft_method
from nibble.plan.inputs import PlanInputs
from nibble.plan.nvfp4_options import asked, set_by_user
from nibble.plan.startup import SPECULATIVE

# Targets on which steps from graphs have run, with answers equal to those of vLLM's path.
TARGETS = ("hopper",)
# Methods of speculative decoding with which they did.
DRAFTS = ("eagle", "mtp")
MOST_HEADS = 64  # of queries, where a config does not say it
RIGHT = "answers are those of vLLM's path (docs/step_graph.md)"
_UNTESTED_KINDS = {
    "state": "recurrent state",
    "sliding": "sliding windows",
    "mla": "latent attention",
    "shared": "shared caches",
    "none": "layers without a cache",
}
# Flags with which the plugin leaves all steps to vLLM's path.
_OBSTACLES = {
    "--enforce-eager": "without CUDA graphs",
    "--enable-lora": "with adapters",
    "--kv-transfer-config": "with a KV connector",
    "--ec-transfer-config": "with an encoder connector",
    "--enable-eplb": "with balanced experts",
}
_SEVERAL = {
    "--tensor-parallel-size": "tensor parallelism",
    "--pipeline-parallel-size": "pipeline parallelism",
    "--data-parallel-size": "data parallelism",
    "--decode-context-parallel-size": "context parallelism",
    "--prefill-context-parallel-size": "context parallelism",
}


def choose_step_graph(inputs: PlanInputs, args: Mapping[str, Choice]) -> Choice | None:
    """`on` or `off` with the reason; None on the CPU."""
    if inputs.target.device != "cuda":
        return None
    values = values_of(args)
    if (given := set_by_user("step_graph", args)) is not None:
        return given
    source = str(inputs.loaded.origins["step_graph"])
    obstacle = _obstacle(inputs.target.name, values) or _untested(inputs.checkpoint)
    obstacle = obstacle or inputs.without_plugin
    return Choice("off" if obstacle else "on", source, obstacle or RIGHT)


def _untested(checkpoint: Checkpoint | None) -> str:
    """What of the model has not run in steps from graphs; empty if each of its layers keeps keys
    and values of all tokens, or is a gated delta net.
    """
    if checkpoint is None:
        return "the checkpoint is unknown until pull"
    found = layers(checkpoint.config)
    if found is None:
        return f"steps from graphs are not tested with {checkpoint.architecture}"
    kinds = {layer.kind for layer in found if not layer.is_draft and not layer.is_delta_net}
    untested = sorted(_UNTESTED_KINDS.get(kind, kind) for kind in kinds - {"full"})
    return f"steps from graphs are not tested with {untested[0]}" if untested else ""


def planned_bytes(checkpoint: Checkpoint | None, args: Mapping[str, Choice]) -> int:
    """What the plan reserves for graphs of whole steps."""
    values = values_of(args)
    if asked(values).get("step_graph") != "on":
        return 0
    sequences = values.get("--max-num-seqs")
    requests = int(sequences) if sequences else None
    taken = step_graph_bytes(requests, _vocabulary(checkpoint), _drafts(values))
    if checkpoint is None or not captures_prompts(checkpoint, args):
        return taken
    gpus = int(values.get("--tensor-parallel-size") or 1)
    heads = max(1, (checkpoint.num_attention_heads or MOST_HEADS) // gpus)
    head_dim = max(one.head_dim for one in layers(checkpoint.config) or ())
    return taken + prompt_graph_bytes(heads, head_dim)


def captures_prompts(checkpoint: Checkpoint | None, args: Mapping[str, Choice]) -> bool:
    """Whether steps with short prompts have graphs of the whole model, too
    (engine/plugin/step_graph/prompts.py).
    """
    found = layers(checkpoint.config) if checkpoint is not None else None
    values = values_of(args)
    if asked(values).get("step_graph") != "on" or not found:
        return False
    if any(values.get(name) for name in SPECULATIVE):
        return False
    if str(values.get("--kv-cache-dtype") or "auto") not in ("auto", "bfloat16"):
        return False
    return all(one.kind == "full" for one in found if not one.is_draft)


def _drafts(args: Mapping[str, Any]) -> int:
    """How many tokens are drafted in a step, as far as the flags say it."""
    config = args.get("--speculative-config")
    nested = config.get("num_speculative_tokens") if isinstance(config, Mapping) else None
    return int(nested or args.get("--spec-tokens") or 0)


def _vocabulary(checkpoint: Checkpoint | None) -> int | None:
    if checkpoint is None:
        return None
    configs = (checkpoint.text_config, checkpoint.config)
    sizes = (config.get("vocab_size") for config in configs)
    return next((size for size in sizes if isinstance(size, int)), None)


def _obstacle(target: str, args: Mapping[str, Any]) -> str:
    """Why `auto` does not take graphs; empty if nothing prevents it."""
    if target not in TARGETS:
        return f"steps from graphs are tested only on {' and '.join(TARGETS)}"
    for flag, what in _OBSTACLES.items():
        if args.get(flag) not in (None, False):
            return f"vLLM's path runs all steps {what}"
    if any(args.get(flag) not in (None, False) for flag in SPECULATIVE):
        method = draft_method(args)
        if method not in DRAFTS:
            return f"steps from graphs are not tested with drafts of {method or 'this drafter'}"
    for flag, what in _SEVERAL.items():
        if int(args.get(flag) or 1) > 1:
            return f"steps from graphs are not tested with {what}"
    return ""
