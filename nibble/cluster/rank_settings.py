"""The flags and variables that all ranks of a model must share, as text. Pure.

nibble compares every flag and variable that is not listed here as a node's own, so that new ones of
vLLM are compared too. Each list says why its entries may differ.
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
"""`value` and `source`; the source as `nibble plan` shows it, such as "command line --dtype"."""

# Flags of the API server, which only rank 0 has.
API_FLAGS = """
allow-credentials allowed-headers allowed-local-media-path allowed-media-domains allowed-methods
allowed-origins api-key api-server-count chat-template chat-template-content-format
default-chat-template-kwargs disable-fastapi-docs disable-uvicorn-access-log
enable-auto-tool-choice enable-offline-docs enable-request-id-headers
enable-server-load-tracking enable-ssl-refresh enable-tokenizer-info-endpoint
exclude-tools-when-tool-choice-none fail-on-environ-validation generation-config grpc grpc-port
h11-max-header-count h11-max-incomplete-event-size headless host max-num-queued-reqs
max-num-queued-tokens middleware override-generation-config port response-role
return-tokens-as-token-ids root-path served-model-name shutdown-timeout ssl-ca-certs
ssl-cert-reqs ssl-certfile ssl-ciphers ssl-keyfile sse-keep-alive-interval tokenizer
tokenizer-mode tokenizer-revision tool-call-parser tool-parser-plugin tool-server
tool-strict-level trust-request-chat-template uds
"""
# Logs and metrics.
LOG_FLAGS = """
aggregate-engine-logging collect-detailed-traces disable-access-log-for-endpoints
disable-log-stats enable-log-deltas enable-log-outputs enable-log-requests
enable-logging-iteration-details enable-mfu-metrics enable-per-request-metrics kv-cache-metrics
kv-cache-metrics-sample log-config-file log-error-stack log-level logging-config max-log-len
otlp-traces-endpoint show-hidden-metrics-for-version use-tqdm-on-load uvicorn-log-level
"""
# Places and this node's part. The contents of model and draft are compared separately.
PLACE_FLAGS = """
code-revision config data-parallel-address data-parallel-rank data-parallel-size-local
data-parallel-start-rank device-ids download-dir hf-config-path hf-token lora-modules model
node-rank numa-bind numa-bind-cpus numa-bind-nodes pt-load-map-location revision
"""
# This machine's memory, and how it reads files. vLLM takes the least memory of all workers
# (vllm 0.32 v1/core/kv_cache_utils.py, get_kv_cache_configs).
MEMORY_FLAGS = """
gpu-memory-utilization kv-cache-memory-bytes max-parallel-loading-workers
safetensors-load-strategy safetensors-prefetch-block-size safetensors-prefetch-num-threads
"""
# Flags that may differ between ranks: workers do not read them, or they belong to one machine.
OWN_FLAGS = frozenset(
    "--" + name for name in (API_FLAGS + LOG_FLAGS + PLACE_FLAGS + MEMORY_FLAGS).split()
)
# Keys of JSON flags that name a place.
OWN_KEYS = frozenset({"cache_dir", "debug_dump_path", "local_cache_dir", "model", "revision"})

# Prefixes of variables that are compared. VLLM_: kernels, numerics and the protocol between ranks.
# NCCL_: all ranks of a communicator must choose the same algorithm, protocol and channels, or they
# wait for each other forever. The others choose kernels, rounding and compilation.
COMPARED_PREFIXES = (
    *("VLLM_", "NCCL_", "TORCH", "TRITON_", "FLASHINFER_", "HUMMING_", "CUBLAS"),
    *("NVIDIA_TF32", "ONEDNN_", "ATEN_CPU_"),
)
# Endings of variables that name a place, a network card or a library of this node.
OWN_ENDINGS = (
    *("_DIR", "_PATH", "_FILE", "_FOLDER", "_ROOT", "_BASE", "_CACHE", "_HOME"),
    *("_IFNAME", "_HCA", "_GID_INDEX", "_ADDR", "_IP", "_HOST", "_PORT", "_URL", "_SERVER"),
    *("_BUFFER_NAME", "_HOSTID", "_LOGS"),
)
# Prefixes of variables for logs, the API, this node's network and its compilers.
OWN_PREFIXES = (
    *("VLLM_LOG", "VLLM_DEBUG_", "VLLM_USAGE_", "VLLM_MEDIA_", "VLLM_ASSETS_", "VLLM_HTTP_"),
    *("VLLM_SERVER_", "VLLM_API_", "NCCL_DEBUG", "NCCL_SOCKET_", "NCCL_TOPO", "NCCL_IB_TC"),
    *("NCCL_IB_SL", "TORCH_LOGS", "TORCH_SHOW_", "TORCHELASTIC_", "TORCH_EXTENSIONS_"),
    *("TORCH_CUDA_ARCH_LIST", "TORCH_CPP_"),
)
# Memory, threads, timeouts and processes of this machine. `facts.compare` compares NCCL_IB_DISABLE
# together with the RDMA devices. NVIDIA's images set NCCL_VERSION as information only.
_OWN_NAMES = """
VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_DO_NOT_TRACK
VLLM_NO_USAGE_STATS VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
VLLM_RPC_TIMEOUT VLLM_EXTRA_ARGS VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_KEEP_ALIVE_ON_ENGINE_DEATH
VLLM_TARGET_DEVICE VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_ENABLE_STARTUP_PLAN
VLLM_WORKER_MULTIPROC_METHOD NCCL_IB_DISABLE NCCL_VERSION
"""
OWN_NAMES = frozenset(_OWN_NAMES.split())


def compared_flags(args: Mapping[str, Choice]) -> dict[str, Setting]:
    """Flag -> value and source. JSON flags have one entry for each key; flags at vLLM's default are
    left out.
    """
    schema, redact = load_schema(), Redactor(())
    settings: dict[str, Setting] = {}
    for flag, choice in args.items():
        spec = schema.flag(flag)
        if flag in OWN_FLAGS or is_secret_name(flag) or (spec and choice.value == spec.default):
            continue
        for name, value in _leaves(flag, choice.value):
            settings[name] = {"value": redact.text(value), "source": choice.source}
    return settings


def compared_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that must be equal on all ranks, without those that may be secrets."""
    redact = Redactor(())
    return {
        name: redact.text(value)
        for name, value in sorted(environ.items())
        if name.startswith(COMPARED_PREFIXES) and not _is_own(name) and not _may_be_secret(name)
    }


def _is_own(name: str) -> bool:
    return name in OWN_NAMES or name.startswith(OWN_PREFIXES) or name.endswith(OWN_ENDINGS)


def _may_be_secret(name: str) -> bool:
    """Whether a variable may be a secret. VLLM_…TOKENS… are counts of tokens, which must be
    equal.
    """
    return is_secret_name(name) and not ("TOKENS" in name and name.startswith("VLLM_"))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Each key of a JSON flag with its value: ("--additional-config nibble.nvfp4_activations",
    "bf16").
    """
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
    """Facts of a rank that has a plan, as plain data: every rank without Ray, only the server with
    Ray.

    `environ` is the environment of vLLM's processes on this machine.
    """
    return {
        "flags": compared_flags(plan.args),
        "environment": compared_environment(environ),
        "code": dict(build_parts()),
    }


def checkpoint_folders(plan: Plan) -> dict[str, str]:
    """ "model" and "draft" -> the folder that workers of `plan` load. Hub models without a local
    folder are left out.
    """
    draft = plan.args.get("--speculative-config")
    draft_model = draft.value.get("model") if draft and isinstance(draft.value, Mapping) else None
    folder = plan.checkpoint.path if plan.checkpoint else None
    places = {"model": str(folder) if folder else plan.model, "draft": str(draft_model or "")}
    return {label: place for label, place in places.items() if place.startswith("/")}
