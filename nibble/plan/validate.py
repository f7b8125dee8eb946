"""Refuses requests that cannot work, before anything starts. Pure: each check raises one error."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.nvfp4 import GROUP_SIZE
from nibble.errors import ExitCode, NibbleError
from nibble.machine.hardware import Hardware
from nibble.machine.targets import Target
from nibble.plan.topology import Topology
from nibble.recipes.resolution import ResolvedRecipe
from nibble.settings.declare import token_count
from nibble.settings.options import Settings

# From vLLM 0.32 model_executor/layers/quantization/turboquant/config.py:72 (perplexity) and vllm PR
# #38479 (GSM8K, 200 questions, Qwen3-4B, 0.900 with a BF16 cache). nibble has not measured them.
TURBOQUANT_COST: Mapping[str, str] = {
    "turboquant_k8v4": "perplexity +1.17 %, GSM8K 0.90 -> 0.86, cache 2.6x smaller",
    "turboquant_4bit_nc": "perplexity +2.71 %, GSM8K 0.90 -> 0.84, cache 3.8x smaller",
    "turboquant_k3v4_nc": "perplexity +10.63 %, GSM8K 0.90 -> 0.78, cache 4.3x smaller",
    "turboquant_3bit_nc": "perplexity +20.59 %, GSM8K 0.90 -> 0.72, cache 4.9x smaller",
}


# This server has no --middleware (vllm 0.32 entrypoints/cli/serve.py:65).
RUST_FRONTEND = "VLLM_USE_RUST_FRONTEND"


def check_request(settings: Settings) -> None:
    """Refuse what the settings alone rule out. Raises CONFIG."""
    if settings.cute_wo_split != 1:
        what = (
            f"CUTE_WO_SPLIT={settings.cute_wo_split} needs the CuTe attention kernel with a split"
            " output projection"
        )
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="CUTE_WO_SPLIT=1, because nibble has no such kernel",
            action="unset CUTE_WO_SPLIT",
        )
    if settings.tq is not None and settings.tq not in TURBOQUANT_COST:
        what = f"there is no TurboQuant preset {settings.tq!r}"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="one of " + ", ".join(TURBOQUANT_COST),
            action="correct --tq or NIBBLE_TQ",
        )
    if settings.port == settings.control_port:
        what = f"PORT and NIBBLE_CONTROL_PORT are both {settings.port}"
        raise NibbleError(
            ExitCode.CONFIG, what=what, expected="two different ports", action="change one of them"
        )


def check_recipe(recipe: ResolvedRecipe | None, target: Target) -> None:
    """Refuse a model that its recipe marks as unsupported on this target. Raises CONFIG."""
    if recipe is not None and recipe.status == "unsupported":
        reason = ("; ".join(recipe.notes) or recipe.evidence).strip().rstrip(".")
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{recipe.id} is not supported on {target.name}: {reason}",
            action="see `nibble recipes show`",
        )


def check_model(checkpoint: Checkpoint | None, target: Target, args: Mapping[str, Any]) -> None:
    """Refuse what checkpoint and target rule out together. Raises CONFIG or MODEL."""
    if checkpoint is not None:
        check_checkpoint(checkpoint, args)
        _check_context(checkpoint, args.get("--max-model-len"))
    _check_turboquant(checkpoint, target, str(args.get("--kv-cache-dtype", "")))
    _check_remote_code(checkpoint, args)


def check_checkpoint(checkpoint: Checkpoint, args: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that works on no target. Raises CONFIG or MODEL."""
    scheme = checkpoint.scheme
    if scheme.unsupported_reason:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{checkpoint.id} is {scheme.name}: {scheme.unsupported_reason}",
            action="choose another quantization of this model",
        )
    with_draft = drafts_from_itself(args.get("--speculative-config"))
    for problem in checkpoint.problems:
        if with_draft or not problem.is_draft:
            raise problem.error(checkpoint.where)


def drafts_from_itself(speculative_config: Any) -> bool:
    """Whether --speculative-config uses the checkpoint's MTP layers as the draft."""
    config = speculative_config if isinstance(speculative_config, Mapping) else {}
    return "mtp" in str(config.get("method")) and "model" not in config


def _check_context(checkpoint: Checkpoint, max_model_len: Any) -> None:
    limit, tokens = checkpoint.max_model_len, token_count(max_model_len)
    if limit is not None and tokens is not None and tokens > limit:
        what = f"MAX_MODEL_LEN is {tokens}, beyond the {limit} tokens of {checkpoint.id}"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected=f"at most {limit}",
            action="lower MAX_MODEL_LEN or --max-model-len",
        )


def _check_turboquant(checkpoint: Checkpoint | None, target: Target, kv_cache_dtype: str) -> None:
    if not kv_cache_dtype.startswith("turboquant_"):
        return
    where = None
    if target.device == "cpu":
        where = "on the CPU"
    elif checkpoint is not None and any(layer.kind == "mla" for layer in checkpoint.layers or ()):
        where = f"with multi-head latent attention ({checkpoint.id})"
    if where:
        what = f"the KV cache dtype {kv_cache_dtype} does not work {where}"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="a GPU and ordinary attention",
            action="drop --tq or --kv-cache-dtype",
        )


def _check_remote_code(checkpoint: Checkpoint | None, args: Mapping[str, Any]) -> None:
    if args.get("--trust-remote-code") is not True or (
        checkpoint is not None and checkpoint.is_local
    ):
        return
    if not re.fullmatch(r"[0-9a-f]{40}", str(args.get("--revision", ""))):
        what = (
            "--trust-remote-code runs code from the model's repository, and its revision is not"
            " pinned"
        )
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="a revision of 40 hex digits",
            action="set NIBBLE_REVISION to a commit whose code you have read",
        )


def check_api(args: Mapping[str, Any], environ: Mapping[str, str], topology: Topology) -> None:
    """Refuse flags that leave no HTTP API behind nibble's gate. vLLM's other servers admit every
    client, before ready and without a key.
    """
    other = next((flag for flag in ("--grpc", "--headless") if args.get(flag) is True), "")
    servers = args.get("--api-server-count")
    if environ.get(RUST_FRONTEND, "0").strip() not in ("", "0"):
        what, action = f"{RUST_FRONTEND} serves without nibble's gate", f"unset {RUST_FRONTEND}"
    elif other == "--grpc":
        what, action = "--grpc serves another API, without nibble's gate", "drop --grpc"
    elif (other or (servers is not None and int(servers) < 1)) and not topology.is_headless:
        what = f"{other or f'--api-server-count {servers}'} starts engines without an API"
        action = (
            "drop it; for a rank on another machine set NIBBLE_NNODES and NIBBLE_NODE_RANK"
            " (docs/cluster.md)"
        )
    elif str(args.get("--ssl-cert-reqs")) == str(ssl.CERT_REQUIRED.value):
        what = (
            "--ssl-cert-reqs 2 refuses requests without a client certificate, which nibble's"
            " requests do not have"
        )
        action = "drop it, and require client certificates in a proxy"
    else:
        return
    raise NibbleError(ExitCode.CONFIG, what=what, expected="vLLM's HTTP API", action=action)


def _parallel_problem(checkpoint: Checkpoint, size: int) -> str:
    """What of the model tensor parallelism of `size` cannot divide, or ""."""
    heads, kv_heads = checkpoint.num_attention_heads, checkpoint.num_key_value_heads
    if heads and heads % size:
        return f"does not divide the {heads} attention heads"
    is_mla = any(layer.kind == "mla" for layer in checkpoint.layers or ())
    # vLLM splits KV heads, or copies them (vllm 0.32 model_executor/layers/linear.py:1053).
    if kv_heads and not is_mla and kv_heads % size and size % kv_heads:
        return f"neither divides nor is a multiple of the {kv_heads} KV heads"
    for blocks in _mlp_blocks(checkpoint):
        if blocks % size:
            return f"does not divide the {blocks} NVFP4 blocks in a row of the MLP"
    return ""


def _mlp_blocks(checkpoint: Checkpoint) -> set[int]:
    """Blocks of 16 weights in a row of each dense down_proj, whose columns the ranks share."""
    return {
        weight.columns // GROUP_SIZE
        for weight in checkpoint.nvfp4
        if weight.module.endswith(".mlp.down_proj") and not weight.is_draft
    }


def _sizes(checkpoint: Checkpoint) -> str:
    """The tensor parallel sizes of the model, in words: those of one machine, which has 16 GPUs
    at most.
    """
    *rest, last = [str(size) for size in range(1, 17) if not _parallel_problem(checkpoint, size)]
    return f"{', '.join(rest)} or {last}" if rest else last


def check_parallel(
    checkpoint: Checkpoint | None,
    hardware: Hardware,
    target: Target,
    tensor_parallel: int,
    topology: Topology,
) -> None:
    """Check the tensor parallel size against the model's heads and blocks, and the ranks against
    the machine's GPUs. Raises CONFIG.
    """
    if checkpoint and (problem := _parallel_problem(checkpoint, tensor_parallel)):
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"TENSOR_PARALLEL_SIZE={tensor_parallel} {problem} of {checkpoint.id}",
            expected=_sizes(checkpoint),
            action="change TENSOR_PARALLEL_SIZE",
        )
    ranks = topology.ranks_here
    if target.device == "cuda" and ranks > len(hardware.gpus):
        what = f"{ranks} GPUs are needed, but this machine has {len(hardware.gpus)}"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="at most the GPUs of this machine",
            action="lower TENSOR_PARALLEL_SIZE or --data-parallel-size, or serve on several"
            " machines (docs/cluster.md)",
        )
