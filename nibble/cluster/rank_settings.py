"""The flags and variables that all ranks of a model must share, as text. Pure.

A flag or variable that is not listed here as a node's own is compared, so that a new one of vLLM's
is compared too. What may differ is listed with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nibble.engine.installed import build_parts
from nibble.engine.schema import load_schema
from nibble.settings.redact import Redactor, is_secret_name

if TYPE_CHECKING:
    from nibble.plan.choice import Choice
    from nibble.plan.plan import Plan

Setting = Mapping[str, str]
"""`value` and `source`; a source is what `nibble plan` shows, such as "command line --dtype"."""

# Flags that one rank may have and another not. Workers do not read them (the API, logs, text in and
# out), or they name a place, or vLLM takes the least of all workers (memory: vllm 0.32
# v1/core/kv_cache_utils.py, get_kv_cache_configs).
OWN_FLAGS = frozenset(
    "--" + name
    for name in (
        # the API server, which only rank 0 has
        "allow-credentials",
        "allowed-headers",
        "allowed-local-media-path",
        "allowed-media-domains",
        "allowed-methods",
        "allowed-origins",
        "api-key",
        "api-server-count",
        "chat-template",
        "chat-template-content-format",
        "default-chat-template-kwargs",
        "disable-fastapi-docs",
        "disable-uvicorn-access-log",
        "enable-auto-tool-choice",
        "enable-offline-docs",
        "enable-request-id-headers",
        "enable-server-load-tracking",
        "enable-ssl-refresh",
        "enable-tokenizer-info-endpoint",
        "exclude-tools-when-tool-choice-none",
        "generation-config",
        "grpc",
        "grpc-port",
        "h11-max-header-count",
        "h11-max-incomplete-event-size",
        "headless",
        "host",
        "max-num-queued-reqs",
        "max-num-queued-tokens",
        "middleware",
        "override-generation-config",
        "port",
        "response-role",
        "return-tokens-as-token-ids",
        "root-path",
        "served-model-name",
        "shutdown-timeout",
        "ssl-ca-certs",
        "ssl-cert-reqs",
        "ssl-certfile",
        "ssl-ciphers",
        "ssl-keyfile",
        "sse-keep-alive-interval",
        "tokenizer",
        "tokenizer-mode",
        "tokenizer-revision",
        "tool-call-parser",
        "tool-parser-plugin",
        "tool-server",
        "tool-strict-level",
        "trust-request-chat-template",
        "uds",
        "fail-on-environ-validation",
        # logs and metrics
        "aggregate-engine-logging",
        "collect-detailed-traces",
        "disable-access-log-for-endpoints",
        "disable-log-stats",
        "enable-log-deltas",
        "enable-log-outputs",
        "enable-log-requests",
        "enable-logging-iteration-details",
        "enable-mfu-metrics",
        "enable-per-request-metrics",
        "kv-cache-metrics",
        "kv-cache-metrics-sample",
        "log-config-file",
        "log-error-stack",
        "log-level",
        "logging-config",
        "max-log-len",
        "otlp-traces-endpoint",
        "show-hidden-metrics-for-version",
        "use-tqdm-on-load",
        "uvicorn-log-level",
        # places and this node's part; the content of model and draft is compared itself
        "code-revision",
        "config",
        "data-parallel-address",
        "data-parallel-rank",
        "data-parallel-size-local",
        "data-parallel-start-rank",
        "device-ids",
        "download-dir",
        "hf-config-path",
        "hf-token",
        "lora-modules",
        "model",
        "node-rank",
        "numa-bind",
        "numa-bind-cpus",
        "numa-bind-nodes",
        "pt-load-map-location",
        "revision",
        # this machine's memory, and how it reads files
        "gpu-memory-utilization",
        "kv-cache-memory-bytes",
        "max-parallel-loading-workers",
        "safetensors-load-strategy",
        "safetensors-prefetch-block-size",
        "safetensors-prefetch-num-threads",
    )
)
# Keys of JSON flags that name a place.
OWN_KEYS = frozenset({"cache_dir", "debug_dump_path", "local_cache_dir", "model", "revision"})

# Families of variables that are compared. VLLM_: kernels, numbers and the protocol between ranks.
# NCCL_: all ranks of a communicator must choose one algorithm, protocol and layout of channels, or
# they wait for each other without end. TORCH…, TRITON_, FLASHINFER_, HUMMING_, CUBLAS…,
# NVIDIA_TF32…: other kernels, other rounding, compiled or not.
FAMILIES = (
    "VLLM_",
    "NCCL_",
    "TORCH",
    "TRITON_",
    "FLASHINFER_",
    "HUMMING_",
    "CUBLAS",
    "NVIDIA_TF32",
    "ONEDNN_",
    "ATEN_CPU_",
)
# What a name of those families ends with where it names a place, a network card or a library of
# this node.
OWN_ENDINGS = (
    "_DIR",
    "_PATH",
    "_FILE",
    "_FOLDER",
    "_ROOT",
    "_BASE",
    "_CACHE",
    "_HOME",
    "_IFNAME",
    "_HCA",
    "_GID_INDEX",
    "_ADDR",
    "_IP",
    "_HOST",
    "_PORT",
    "_URL",
    "_SERVER",
    "_BUFFER_NAME",
    "_HOSTID",
    "_LOGS",
)
OWN_PREFIXES = (
    "VLLM_LOG",
    "VLLM_DEBUG_",
    "VLLM_USAGE_",
    "VLLM_MEDIA_",
    "VLLM_ASSETS_",
    "VLLM_HTTP_",
    "VLLM_SERVER_",
    "VLLM_API_",
    "NCCL_DEBUG",
    "NCCL_SOCKET_",
    "NCCL_TOPO",
    "NCCL_IB_TC",
    "NCCL_IB_SL",
    "TORCH_LOGS",
    "TORCH_SHOW_",
    "TORCHELASTIC_",
    "TORCH_EXTENSIONS_",
    "TORCH_CUDA_ARCH_LIST",
    "TORCH_CPP_",
)
# Memory, threads, time limits and processes of this machine. NCCL_IB_DISABLE is compared with the
# network's devices (facts.py), NCCL_VERSION is a note of NVIDIA's images.
OWN_NAMES = frozenset(
    (
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_CPU_NUM_OF_RESERVED_CPU",
        "VLLM_DO_NOT_TRACK",
        "VLLM_NO_USAGE_STATS",
        "VLLM_ENGINE_READY_TIMEOUT_S",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        "VLLM_RPC_TIMEOUT",
        "VLLM_EXTRA_ARGS",
        "VLLM_ENABLE_CUDA_COMPATIBILITY",
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
        "VLLM_TARGET_DEVICE",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS",
        "VLLM_ENABLE_STARTUP_PLAN",
        "VLLM_WORKER_MULTIPROC_METHOD",
        "NCCL_IB_DISABLE",
        "NCCL_VERSION",
    )
)


def compared_flags(args: Mapping[str, Choice]) -> dict[str, Setting]:
    """Flag -> its value and source, JSON flags key by key; a flag at vLLM's default is as good
    as none.
    """
    schema, redact = load_schema(), Redactor(())
    found: dict[str, Setting] = {}
    for flag, choice in args.items():
        spec = schema.flag(flag)
        if flag in OWN_FLAGS or is_secret_name(flag) or (spec and choice.value == spec.default):
            continue
        for name, value in _leaves(flag, choice.value):
            found[name] = {"value": redact.text(value), "source": choice.source}
    return found


def compared_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that must agree, without secrets: neither their names nor their values."""
    redact = Redactor(())
    return {
        name: redact.text(value)
        for name, value in sorted(environ.items())
        if name.startswith(FAMILIES) and not _is_own(name) and not _may_be_secret(name)
    }


def _is_own(name: str) -> bool:
    return name in OWN_NAMES or name.startswith(OWN_PREFIXES) or name.endswith(OWN_ENDINGS)


def _may_be_secret(name: str) -> bool:
    """vLLM's own names have numbers of tokens among them, which change how prompts are cut."""
    return is_secret_name(name) and not ("TOKENS" in name and name.startswith("VLLM_"))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """("--additional-config nibble.nvfp4_activations", "bf16"), …"""
    if not isinstance(value, Mapping):
        yield (
            name,
            value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str),
        )
        return
    for key, inner in sorted(value.items()):
        if key not in OWN_KEYS and not is_secret_name(str(key)):
            yield from _leaves(f"{name}.{key}" if " " in name else f"{name} {key}", inner)


def rank_facts(plan: Plan, environ: Mapping[str, str]) -> dict[str, Any]:
    """Plain data for the preflight, of a rank that has a plan: without Ray all have, with Ray the
    server alone.

    `environ` is what vLLM's processes get here.
    """
    return {
        "flags": compared_flags(plan.args),
        "environment": compared_environment(environ),
        "code": dict(build_parts()),
    }


def checkpoint_folders(plan: Plan) -> dict[str, str]:
    """ "model" and "draft" -> the folder that workers of `plan` load from; other models are
    omitted.
    """
    draft = plan.args.get("--speculative-config")
    named = draft.value.get("model") if draft and isinstance(draft.value, Mapping) else None
    folder = plan.checkpoint.path if plan.checkpoint else None
    found = {"model": str(folder) if folder else plan.model, "draft": str(named or "")}
    return {label: place for label, place in found.items() if place.startswith("/")}
