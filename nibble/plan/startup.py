"""Skips work at a start: imports, memory profiling, unused CUDA graphs and tuning. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from nibble.checkpoint import Checkpoint
from nibble.engine.step_graph_memory import PROMPT_SIZES
from nibble.machine.targets import Target
from nibble.plan.budget import is_shared
from nibble.plan.choice import Choice, Choices
from nibble.plan.inputs import PlanInputs

SOURCE = "nibble's default"
CAPTURE = "--cudagraph-capture-sizes"
AUTOTUNE = "--enable-flashinfer-autotune"
SPECULATIVE = ("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens")
# Flags that add processes to the server and its engine.
_SEVERAL = (
    *("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"),
    *("--api-server-count", "--distributed-executor-backend", "--nnodes"),
)
_SIZES = frozenset({"cudagraph_capture_sizes", "max_cudagraph_capture_size", "cudagraph_mode"})


def fast_start_flags(
    inputs: PlanInputs, args: Mapping[str, Choice], *, captures_prompts: bool
) -> Choices:
    """Flags that skip work at a start. A value that a layer sets stays."""
    if inputs.target.device != "cuda" or _is_true(args, "--enforce-eager"):
        return {}
    return _capture_sizes(args, captures_prompts) | _autotune(
        inputs.target, inputs.checkpoint, args
    )


def fast_start_environment(target: Target, args: Mapping[str, Choice]) -> Choices:
    """Variables that skip work at a start."""
    return _startup_plan(target, args) | _forked_engine(args) if target.device == "cuda" else {}


def _startup_plan(target: Target, args: Mapping[str, Choice]) -> Choices:
    """vLLM stores the KV cache size that it measured. The next start with the same configuration,
    GPU and free memory uses it (vllm 0.32 v1/worker/startup_plan.py). Set only if vLLM measures the
    size.
    """
    if is_shared(target) or "--kv-cache-memory-bytes" in args:
        return {}
    reason = (
        "the next start reuses the KV cache size that this one measures, and captures no graphs to"
        " measure their memory"
    )
    return {"VLLM_ENABLE_STARTUP_PLAN": Choice("1", SOURCE, reason)}


def _forked_engine(args: Mapping[str, Choice]) -> Choices:
    """Fork a single engine process, as vLLM's library does by default. vLLM's command line spawns
    it instead, and the new process imports everything again.

    At that time the server has no other Python thread (observed on the CPU) and has not used the
    GPU. If it has, and on WSL, vLLM spawns anyway (vllm 0.32 utils/system_utils.py:122).
    """
    if has_several_processes(args):
        return {}
    reason = "the engine forks from the server, which has imported all modules"
    return {"VLLM_WORKER_MULTIPROC_METHOD": Choice("fork", SOURCE, reason)}


def has_several_processes(args: Mapping[str, Choice]) -> bool:
    """Whether vLLM starts more than one API server, engine or worker, or binds one to NUMA nodes by
    spawning it.
    """
    several = any(name in args and args[name].value not in (1, None) for name in _SEVERAL)
    return several or _is_true(args, "--numa-bind")


def _capture_sizes(args: Mapping[str, Choice], captures_prompts: bool) -> Choices:
    """vLLM's grid of sizes (vllm 0.32 config/vllm.py:2472) up to MAX_NUM_SEQS; vLLM captures up to
    twice as many. And those for prompts, if the model has such graphs.

    With speculative decoding a step has several tokens for each sequence, so vLLM's sizes stay.
    """
    max_num_seqs = args.get("--max-num-seqs")
    nested = args["--compilation-config"].value if "--compilation-config" in args else {}
    is_set = (
        CAPTURE in args or "--max-cudagraph-capture-size" in args or "--performance-mode" in args
    )
    if max_num_seqs is None or is_set or any(name in args for name in SPECULATIVE):
        return {}
    if isinstance(nested, Mapping) and _SIZES & set(nested):
        return {}
    most = int(max_num_seqs.value)
    if most >= 256:  # vLLM captures at most 512 (1024 on SM100), so little can be saved
        return {}
    sizes = {1, 2, 4, *range(8, most + 1, 8), most} & set(range(1, most + 1))
    reason = (
        f"a decode step has at most MAX_NUM_SEQS={most} tokens; vLLM would capture up to {2 * most}"
    )
    if captures_prompts:
        tokens = args.get("--max-num-batched-tokens")
        sizes |= {size for size in PROMPT_SIZES if tokens is None or size <= int(tokens.value)}
        reason = (
            f"a decode step has at most MAX_NUM_SEQS={most} tokens; steps with prompts have graphs"
            f" up to {PROMPT_SIZES[-1]} tokens (docs/step_graph.md)"
        )
    return {CAPTURE: Choice(sorted(sizes), SOURCE, reason)}


def _autotune(target: Target, checkpoint: Checkpoint | None, args: Mapping[str, Choice]) -> Choices:
    """Turn FlashInfer's autotuning off if no kernel that it tunes runs."""
    is_set = any(flag in args for flag in (AUTOTUNE, "--kernel-config", "--use-replayssm"))
    if is_set or checkpoint is None:
        return {}
    backends = (
        args[name].value
        for name in ("--moe-backend", "--linear-backend", "--attention-backend")
        if name in args
    )
    if any("flashinfer" in str(backend).lower() for backend in backends):
        return {}
    if why := _why_untuned(target, checkpoint):
        reason = f"no kernel that FlashInfer tunes runs here: {why}"
        return {AUTOTUNE: Choice(False, SOURCE, reason)}
    return {}


def _why_untuned(target: Target, checkpoint: Checkpoint) -> str:
    """Why no kernel that FlashInfer tunes runs; empty if one may. It tunes products of quantized
    layers and of experts. Not called for the CPU.
    """
    scheme = checkpoint.scheme
    is_only_nvfp4 = scheme.is_nvfp4 and scheme.vllm_quantization != "modelopt_mixed"
    if is_only_nvfp4 and not target.features.has_fp4_mma:
        return f"NVFP4 is weight-only on {target.name}"
    if scheme.name == "bf16" and checkpoint.num_experts is None:
        return "a dense model in BF16"
    return ""


def _is_true(args: Mapping[str, Choice], name: str) -> bool:
    return name in args and args[name].value is True
