"""Skips work at a start: imports, memory profile, unused CUDA graphs and tuning. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from nibble.checkpoint import Checkpoint
from nibble.machine.targets import Target
from nibble.plan.budget import is_shared
from nibble.plan.choice import Choice, Choices
from nibble.plan.inputs import Ingredients

SOURCE = "nibble's default"
CAPTURE = "--cudagraph-capture-sizes"
AUTOTUNE = "--enable-flashinfer-autotune"
SPECULATIVE = ("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens")
# What makes more processes than a server and its engine.
_SEVERAL = (
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--data-parallel-size",
    "--api-server-count",
    "--distributed-executor-backend",
    "--nnodes",
)
_SIZES = frozenset({"cudagraph_capture_sizes", "max_cudagraph_capture_size", "cudagraph_mode"})


def fast_start_flags(parts: Ingredients, args: Mapping[str, Choice]) -> Choices:
    """Flags that skip work of the start; values that a layer sets stay."""
    if parts.target.device != "cuda" or _is_true(args, "--enforce-eager"):
        return {}
    return _capture_sizes(args) | _autotune(parts.target, parts.checkpoint, args)


def fast_start_environment(target: Target, args: Mapping[str, Choice]) -> Choices:
    """Variables that leave out work of the start."""
    return _startup_plan(target, args) | _forked_engine(args) if target.device == "cuda" else {}


def _startup_plan(target: Target, args: Mapping[str, Choice]) -> Choices:
    """vLLM keeps the KV cache size it measured, and the next start of the same configuration on the
    same GPU with as much free memory takes it (vllm 0.32 v1/worker/startup_plan.py). Only where
    vLLM measures at all.
    """
    if is_shared(target) or "--kv-cache-memory-bytes" in args:
        return {}
    reason = (
        "the next start takes the KV cache size measured by this one and captures no graphs to"
        " measure them"
    )
    return {"VLLM_ENABLE_STARTUP_PLAN": Choice("1", SOURCE, reason)}


def _forked_engine(args: Mapping[str, Choice]) -> Choices:
    """One engine of one process is forked, as vLLM's library does it by default; its command line
    spawns one that imports everything once more. The server has no other Python thread then (seen
    on the CPU) and has not touched the GPU; where it has, and on WSL, vLLM spawns all the same
    (vllm 0.32 utils/system_utils.py:122).
    """
    if any(name in args and args[name].value not in (1, None) for name in _SEVERAL) or _is_true(
        args, "--numa-bind"
    ):
        return {}
    reason = "the engine forks from the server, which has imported all modules"
    return {"VLLM_WORKER_MULTIPROC_METHOD": Choice("fork", SOURCE, reason)}


def _capture_sizes(args: Mapping[str, Choice]) -> Choices:
    """vLLM's own grid (vllm 0.32 config/vllm.py:2472) up to MAX_NUM_SEQS, where vLLM goes to twice
    as many.

    With speculative decoding a decode step has several tokens a sequence, and vLLM covers those
    sizes only by itself.
    """
    asked = args.get("--max-num-seqs")
    nested = args["--compilation-config"].value if "--compilation-config" in args else {}
    is_set = (
        CAPTURE in args or "--max-cudagraph-capture-size" in args or "--performance-mode" in args
    )
    if asked is None or is_set or any(name in args for name in SPECULATIVE):
        return {}
    if isinstance(nested, Mapping) and _SIZES & set(nested):
        return {}
    most = int(asked.value)
    if most >= 256:  # vLLM's ceiling of 512 (1024 on SM100) leaves little to trim there
        return {}
    sizes = sorted({1, 2, 4, *range(8, most + 1, 8), most} & set(range(1, most + 1)))
    reason = (
        f"a decode step has at most MAX_NUM_SEQS={most} tokens; vLLM would capture up to {2 * most}"
    )
    return {CAPTURE: Choice(sizes, SOURCE, reason)}


def _autotune(target: Target, checkpoint: Checkpoint | None, args: Mapping[str, Choice]) -> Choices:
    """Off where nothing FlashInfer tunes is used."""
    if (
        AUTOTUNE in args
        or "--kernel-config" in args
        or "--use-replayssm" in args
        or checkpoint is None
    ):
        return {}
    backends = (
        args[name].value
        for name in ("--moe-backend", "--linear-backend", "--attention-backend")
        if name in args
    )
    if any("flashinfer" in str(backend).lower() for backend in backends):
        return {}
    why = _why_untuned(target, checkpoint)
    return (
        {AUTOTUNE: Choice(False, SOURCE, f"no kernel that FlashInfer tunes runs here: {why}")}
        if why
        else {}
    )


def _why_untuned(target: Target, checkpoint: Checkpoint) -> str:
    """FlashInfer tunes products of quantized layers and of experts; "" where such may run (not
    called for the CPU).
    """
    scheme = checkpoint.scheme
    if (
        scheme.is_nvfp4
        and not target.features.has_fp4_mma
        and scheme.vllm_quantization != "modelopt_mixed"
    ):
        return f"NVFP4 is weight-only on {target.name}"
    if scheme.name == "bf16" and checkpoint.num_experts is None:
        return "a dense model in BF16"
    return ""


def _is_true(args: Mapping[str, Choice], name: str) -> bool:
    return name in args and args[name].value is True
