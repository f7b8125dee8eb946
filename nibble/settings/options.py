"""Declares every option of nibble once: environment name, flag, help, limits.

`sources.py` resolves the values. Help, environment names and the table in docs/operations.md come
from these declarations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from nibble.engine import contract
from nibble.engine.guard.limits import RequestLimits

TURBOQUANT_DEFAULT = "turboquant_k8v4"


@dataclass(frozen=True)
class Option:
    """An option's name, help and limits for every place that shows them; the field has type and
    default.

    `vllm` is the flag of `vllm serve` that gets the value. `expected` completes the sentence
    "expected …" of an error. `bare` is the value of a flag without a value.
    """

    group: str
    help: str
    env: tuple[str, ...] = ()
    flag: str | None = None
    vllm: str | None = None
    expected: str = ""
    secret: bool = False
    bare: str | None = None


def _option(
    default: Any,
    group: str,
    help: str,
    env: str | tuple[str, ...] = (),
    *,
    flag: str | None = None,
    vllm: str | None = None,
    expected: str = "",
    secret: bool = False,
    bare: str | None = None,
    **limits: Any,
) -> Any:
    names = (env,) if isinstance(env, str) else env
    option = Option(group, help, names, flag, vllm, expected, secret, bare)
    return Field(default, json_schema_extra={"option": option}, **limits)  # type: ignore[dict-item]


class Settings(BaseSettings):
    """All options, typed. Construct them through `sources.load_settings`."""

    model_config = SettingsConfigDict(extra="forbid", protected_namespaces=())

    model: str | None = _option(
        None,
        "Model",
        "Hugging Face id or local folder of the model to serve.",
        ("MODEL", "HF_MODEL"),
        expected="a Hugging Face id such as nvidia/Qwen3-8B-NVFP4 or a folder",
        min_length=1,
    )
    revision: str | None = _option(
        None,
        "Model",
        "Commit, branch or tag of the model; 40 hex digits pin it. Default: `main`.",
        "NIBBLE_REVISION",
        flag="--revision",
        vllm="--revision",
        expected="a commit, branch or tag",
        min_length=1,
    )
    served_model_name: str | None = _option(
        None,
        "Model",
        "Additional name of the model, beside its id and `default`.",
        "NIBBLE_SERVED_MODEL_NAME",
        flag="--served-model-name",
        expected="a name",
        min_length=1,
    )
    recipe: Literal["auto", "off"] = _option(
        "auto",
        "Model",
        "Use of the recipe known for this model and target: `auto` or `off`.",
        "NIBBLE_RECIPE",
        flag="--recipe",
        expected="auto or off",
    )
    target: Literal["auto", "gb10", "sm120", "b200", "hopper", "cpu"] = _option(
        "auto",
        "Model",
        "GPU target: `auto` detects the machine's; an image sets its target.",
        "NIBBLE_TARGET",
        flag="--target",
        expected="auto, gb10, sm120, b200, hopper or cpu",
    )
    allow_risk: str = _option(
        "",
        "Model",
        "Known risks to accept, as ids separated by commas; nibble does not apply their rules.",
        "NIBBLE_ALLOW_RISK",
        flag="--allow-risk",
        expected="ids from the table of known risks",
    )

    host: str = _option(
        "127.0.0.1",
        "Server",
        "Address to listen on; the image sets 0.0.0.0.",
        "HOST",
        flag="--host",
        expected="an IP address or localhost",
        min_length=1,
    )
    port: int = _option(
        8000,
        "Server",
        "Port of the OpenAI-compatible API.",
        "PORT",
        flag="--port",
        expected="a whole number from 1 to 65535",
        ge=1,
        le=65535,
    )
    control_port: int = _option(
        8001,
        "Server",
        "Loopback port of /status and /ready; nibble opens it before vLLM starts.",
        "NIBBLE_CONTROL_PORT",
        flag="--control-port",
        expected="a whole number from 1 to 65535",
        ge=1,
        le=65535,
    )
    api_key: SecretStr | None = _option(
        None,
        "Server",
        "Key that clients must send. nibble also reads VLLM_API_KEY. Default: a generated key"
        " on any address but loopback, else none.",
        ("NIBBLE_API_KEY", "VLLM_API_KEY"),
        secret=True,
        expected="a key of at least 8 visible characters",
    )
    allow_anonymous: bool = _option(
        False,
        "Server",
        "Permission to serve without a key on an address other than loopback: 1 or 0.",
        "NIBBLE_ALLOW_ANONYMOUS",
        flag="--allow-anonymous",
        expected="1 or 0",
    )
    drain_seconds: int = _option(
        30,
        "Server",
        "Seconds that running requests may take to finish after SIGTERM.",
        "NIBBLE_DRAIN_SECONDS",
        flag="--drain-seconds",
        expected="a whole number of seconds from 0 to 86400",
        ge=0,
        le=86400,
    )
    stall_seconds: int = _option(
        300,
        "Server",
        "Seconds without a sign of the engine after which nibble reports a stall; nibble does"
        " not end vLLM.",
        "NIBBLE_STALL_SECONDS",
        flag="--stall-seconds",
        expected="a whole number of seconds from 1 to 86400",
        ge=1,
        le=86400,
    )
    hang_seconds: int = _option(
        60,
        "Server",
        "Seconds without progress after which nibble ends a hung vLLM (exit 10); 0 disables the"
        " hang watch.",
        "NIBBLE_HANG_SECONDS",
        flag="--hang-seconds",
        expected="a whole number of seconds from 0 to 86400",
        ge=0,
        le=86400,
    )

    max_header_bytes: int = _option(
        65536,
        "Requests",
        "Maximum bytes of a request's first line and headers; above it, nibble answers 431.",
        "NIBBLE_MAX_HEADER_BYTES",
        vllm="--h11-max-incomplete-event-size",
        expected="a whole number from 1024 to 16777216",
        ge=1024,
        le=1 << 24,
    )
    max_headers: int = _option(
        128,
        "Requests",
        "Maximum headers of a request; above it, nibble answers 431.",
        "NIBBLE_MAX_HEADERS",
        vllm="--h11-max-header-count",
        expected="a whole number from 8 to 65536",
        ge=8,
        le=65536,
    )
    max_body_bytes: int | None = _option(
        None,
        "Requests",
        "Maximum bytes of a request's body; above it, nibble answers 413. Default: 32 MiB, or"
        " 128 MiB if the model takes images, audio or video.",
        "NIBBLE_MAX_BODY_BYTES",
        expected="a whole number from 1024 to 17179869184",
        ge=1024,
        le=1 << 34,
    )
    max_buffered_bytes: int | None = _option(
        None,
        "Requests",
        "Maximum bytes of all unanswered bodies in an API process; above it, a body over 64 KiB"
        " gets 503. Default: 8 times NIBBLE_MAX_BODY_BYTES.",
        "NIBBLE_MAX_BUFFERED_BYTES",
        expected="a whole number from 1024 to 1099511627776",
        ge=1024,
        le=1 << 40,
    )
    head_seconds: int = _option(
        RequestLimits.head_seconds,
        "Requests",
        "Maximum seconds from a connection, or from a request's first byte, to the end of its"
        " headers; above it, nibble answers 408.",
        "NIBBLE_HEAD_SECONDS",
        expected="a whole number of seconds from 1 to 3600",
        ge=1,
        le=3600,
    )
    body_gap_seconds: int = _option(
        RequestLimits.body_gap_seconds,
        "Requests",
        "Maximum seconds between two bytes of a body; above it, nibble answers 408.",
        "NIBBLE_BODY_GAP_SECONDS",
        expected="a whole number of seconds from 1 to 3600",
        ge=1,
        le=3600,
    )
    body_seconds: int = _option(
        RequestLimits.body_seconds,
        "Requests",
        "Maximum seconds for a whole body; above it, nibble answers 408.",
        "NIBBLE_BODY_SECONDS",
        expected="a whole number of seconds from 1 to 86400",
        ge=1,
        le=86400,
    )
    max_connections: int = _option(
        RequestLimits.max_connections,
        "Requests",
        "Maximum connections of an API process. Above it, nibble closes the oldest connection"
        " without a complete request; if all have one, the new connection gets 503.",
        "NIBBLE_MAX_CONNECTIONS",
        expected="a whole number from 8 to 65536",
        ge=8,
        le=65536,
    )
    max_connections_per_address: int = _option(
        RequestLimits.max_connections_per_address,
        "Requests",
        "Maximum connections from one address to an API process; above it, nibble acts as for"
        " NIBBLE_MAX_CONNECTIONS.",
        "NIBBLE_MAX_CONNECTIONS_PER_ADDRESS",
        expected="a whole number from 1 to 65536",
        ge=1,
        le=65536,
    )
    max_json_depth: int = _option(
        RequestLimits.max_json_depth,
        "Requests",
        "Maximum levels of nested arrays and objects in a body; above it, nibble answers 400.",
        "NIBBLE_MAX_JSON_DEPTH",
        expected="a whole number from 8 to 500",
        ge=8,
        le=500,
    )
    max_json_keys: int = _option(
        RequestLimits.max_json_keys,
        "Requests",
        "Maximum keys of all objects in a body; above it, nibble answers 400.",
        "NIBBLE_MAX_JSON_KEYS",
        expected="a whole number from 100 to 10000000",
        ge=100,
        le=10**7,
    )
    max_json_items: int | None = _option(
        None,
        "Requests",
        "Maximum commas and opening brackets in a body, outside its strings; above it, nibble"
        " answers 400. Default: 262144 (1048576 to embed or score) plus twice the context"
        " length.",
        "NIBBLE_MAX_JSON_ITEMS",
        expected="a whole number from 100 to 1000000000",
        ge=100,
        le=10**9,
    )
    max_messages: int = _option(
        RequestLimits.max_messages,
        "Requests",
        "Maximum messages of a chat request; each part and tool call counts as one. Above it,"
        " nibble answers 400.",
        "NIBBLE_MAX_MESSAGES",
        expected="a whole number from 1 to 1000000",
        ge=1,
        le=10**6,
    )
    max_sequences: int = _option(
        RequestLimits.max_sequences,
        "Requests",
        "Maximum sequences of a request: prompts times `n` (or `best_of`), or twice as many"
        " inputs to embed or score. Above it, nibble answers 400.",
        "NIBBLE_MAX_SEQUENCES",
        expected="a whole number from 1 to 1000000",
        ge=1,
        le=10**6,
    )
    max_text_chars: int | None = _option(
        None,
        "Requests",
        "Maximum characters of all text in a body; above it, nibble answers 400. Default:"
        " 4194304, or 8 per token of context if that is larger.",
        "NIBBLE_MAX_TEXT_CHARS",
        expected="a whole number from 1024 to 17179869184",
        ge=1024,
        le=1 << 34,
    )
    max_logprob_entries: int = _option(
        RequestLimits.max_logprob_entries,
        "Requests",
        "Maximum log-probs of a request: tokens times (`logprobs` + 1) times `n`; an entry of a"
        " chat counts 4. Above it, nibble answers 400.",
        "NIBBLE_MAX_LOGPROB_ENTRIES",
        expected="a whole number from 1000 to 1000000000",
        ge=1000,
        le=10**9,
    )
    grammar_seconds: int = _option(
        RequestLimits.grammar_seconds,
        "Requests",
        "Maximum seconds of CPU time to compile a structured output, in a separate process;"
        " above it, nibble answers 400.",
        "NIBBLE_GRAMMAR_SECONDS",
        expected="a whole number of seconds from 1 to 60",
        ge=1,
        le=60,
    )
    grammar_memory_mib: int = _option(
        RequestLimits.grammar_memory_mib,
        "Requests",
        "Maximum MiB of memory to compile a structured output; above it, nibble answers 400.",
        "NIBBLE_GRAMMAR_MEMORY_MIB",
        expected="a whole number of MiB from 16 to 65536",
        ge=16,
        le=65536,
    )
    grammar_bytes: int = _option(
        RequestLimits.grammar_bytes,
        "Requests",
        "Maximum bytes of the schemas, grammars and tools of a request; above it, nibble"
        " answers 400.",
        "NIBBLE_GRAMMAR_BYTES",
        expected="a whole number from 1024 to 33554432",
        ge=1024,
        le=1 << 25,
    )

    max_model_len: int | None = _option(
        None,
        "Engine",
        "Context length in tokens, such as 32768 or 32K. Default: the recipe's or the model's.",
        "MAX_MODEL_LEN",
        flag="--max-model-len",
        vllm="--max-model-len",
        expected="a whole number of tokens from 1 up, such as 32768 or 32K",
        ge=1,
        le=1 << 31,
    )
    max_num_seqs: int | None = _option(
        None,
        "Engine",
        "Sequences decoded at the same time. Default: the recipe's or the target's.",
        "MAX_NUM_SEQS",
        flag="--max-num-seqs",
        vllm="--max-num-seqs",
        expected="a whole number from 1 to 65536",
        ge=1,
        le=65536,
    )
    tensor_parallel_size: int | None = _option(
        None,
        "Engine",
        "GPUs that each layer of one model is split over. Default: the recipe's, else 1.",
        "TENSOR_PARALLEL_SIZE",
        flag="--tensor-parallel-size",
        vllm="--tensor-parallel-size",
        expected="a whole number from 1 to 1024",
        ge=1,
        le=1024,
    )
    pipeline_parallel_size: int | None = _option(
        None,
        "Engine",
        "Stages that the layers of one model are split into. Default: 1.",
        "NIBBLE_PIPELINE_PARALLEL_SIZE",
        flag="--pipeline-parallel-size",
        vllm="--pipeline-parallel-size",
        expected="a whole number from 1 to 1024",
        ge=1,
        le=1024,
    )
    gpu_memory_util: float | None = _option(
        None,
        "Engine",
        "Upper limit of the fraction of GPU memory that vLLM takes.",
        "GPU_MEMORY_UTIL",
        flag="--gpu-memory-utilization",
        vllm="--gpu-memory-utilization",
        expected="a number above 0 and at most 1",
        gt=0,
        le=1,
    )
    kv_cache_bytes: int | None = _option(
        None,
        "Engine",
        "Bytes of KV cache; replaces what vLLM would measure.",
        "NIBBLE_KV_CACHE_BYTES",
        flag="--kv-cache-bytes",
        vllm="--kv-cache-memory-bytes",
        expected="a whole number of bytes from 1048576 up",
        ge=1 << 20,
    )
    memory_reserve_gib: float | None = _option(
        None,
        "Engine",
        "GiB of memory that plan and watchdog leave to the rest of the machine; 0 disables the"
        " watchdog. Default: the target's.",
        "NIBBLE_MEMORY_RESERVE_GIB",
        flag="--memory-reserve-gib",
        expected="a number of GiB from 0 to 4096",
        ge=0,
        le=4096,
    )
    tq: str | None = _option(
        None,
        "Engine",
        "TurboQuant KV cache with more context and lower quality: `1` or a preset. Default:"
        " off; `1` means turboquant_k8v4.",
        "NIBBLE_TQ",
        flag="--tq",
        bare=TURBOQUANT_DEFAULT,
        expected="1 or the name of a preset such as turboquant_k8v4",
    )
    gemma4_attention: Literal["triton", "per-layer", "flashinfer"] = _option(
        "triton",
        "Engine",
        "Attention of Gemma 4 on gb10 and sm120: `triton` (vLLM's choice), `per-layer`"
        " (FlashAttention 2 for sliding layers) or `flashinfer`. Only `triton` is measured.",
        "NIBBLE_GEMMA4_ATTENTION",
        flag="--gemma4-attention",
        expected="triton, per-layer or flashinfer",
    )
    nvfp4_activations: contract.Activations = _option(
        "checkpoint",
        "Engine",
        "Activations of NVFP4 layers: `checkpoint` (what the checkpoint declares) or `bf16`"
        " (weights alone in NVFP4).",
        "NIBBLE_NVFP4_ACTIVATIONS",
        flag="--nvfp4-activations",
        expected="checkpoint or bf16",
    )
    quantize_lm_head: contract.HeadFormat = _option(
        "off",
        "Engine",
        "Quantization of a BF16 output head during the load: `off` or `nvfp4`.",
        "NIBBLE_QUANTIZE_LM_HEAD",
        flag="--quantize-lm-head",
        expected="off or nvfp4",
    )
    linear_kernel: Literal["auto", contract.Kernel] = _option(
        "auto",
        "Engine",
        "Kernel for NVFP4 weights with BF16 activations on a GPU: `vllm` (vLLM's choice),"
        " `nibble` (for few tokens) or `auto`. `auto` takes the one measured faster for this"
        " target and MAX_NUM_SEQS (docs/kernels/nvfp4_linear.md).",
        "NIBBLE_LINEAR_KERNEL",
        flag="--linear-kernel",
        expected="auto, vllm or nibble",
    )
    moe_kernel: contract.Kernel = _option(
        "vllm",
        "Engine",
        "Kernel for NVFP4 experts with BF16 activations on a GPU: `vllm` (vLLM's choice) or"
        " `nibble`.",
        "NIBBLE_MOE_KERNEL",
        flag="--moe-kernel",
        expected="vllm or nibble",
    )
    act_scale_mode: contract.ScaleMode = _option(
        "token",
        "Engine",
        "Group that shares one activation scale in CloverLM: each `token`, the whole `batch`"
        " (its authors' choice), or `batch-pow2` (the batch's scale as a power of two).",
        "NIBBLE_ACT_SCALE_MODE",
        flag="--act-scale-mode",
        expected="token, batch-pow2 or batch",
    )
    kernel_assertion: Literal["strict", "warn"] = _option(
        "strict",
        "Engine",
        "Action if the kernels that run differ from the plan: `strict` ends the start (exit 8),"
        " `warn` continues.",
        "NIBBLE_KERNEL_ASSERTION",
        flag="--kernel-assertion",
        expected="strict or warn",
    )
    canary: Literal["strict", "warn", "off"] = _option(
        "strict",
        "Engine",
        "Action if layers or answers are wrong: `strict` ends the start (exit 8), `warn`"
        " continues; `off` skips the check.",
        "NIBBLE_CANARY",
        flag="--canary",
        expected="strict, warn or off",
    )
    reference: Literal["auto", "always", "off"] = _option(
        "auto",
        "Engine",
        "Canary answers computed from the checkpoint: `auto` computes them at the first start"
        " if that takes under 60 s, `always` at any cost, `off` uses none.",
        "NIBBLE_REFERENCE",
        flag="--reference",
        expected="auto, always or off",
    )
    debug: bool = _option(
        False,
        "Engine",
        "Debug mode with eager execution, no CUDA graphs and verbose logs: 1 or 0.",
        "NIBBLE_DEBUG",
        flag="--debug",
        expected="1 or 0",
    )
    cute_wo_split: int = _option(
        1,
        "Engine",
        "K-split of the CuTe output projection; 1 is the only supported value.",
        "CUTE_WO_SPLIT",
        expected="1, 2, 4 or 8",
        ge=1,
        le=8,
    )
    vllm_extra_args: str = _option(
        "",
        "Engine",
        "Additional flags for `vllm serve`, split as a shell splits them.",
        "VLLM_EXTRA_ARGS",
    )

    cluster: Literal["auto", "ray", "mp"] = _option(
        "auto",
        "Cluster",
        "Connection of ranks on several machines: `ray`, `mp` (vLLM without Ray) or `auto`"
        " (derived from the other options).",
        "NIBBLE_CLUSTER",
        flag="--cluster",
        expected="auto, ray or mp",
    )
    nnodes: int | None = _option(
        None,
        "Cluster",
        "Machines that serve one model together without Ray.",
        "NIBBLE_NNODES",
        flag="--nnodes",
        vllm="--nnodes",
        expected="a whole number from 1 to 1024",
        ge=1,
        le=1024,
    )
    node_rank: int | None = _option(
        None,
        "Cluster",
        "Number of this machine among them; number 0 has the API and the address HEAD_IP.",
        "NIBBLE_NODE_RANK",
        flag="--node-rank",
        vllm="--node-rank",
        expected="a whole number from 0 to 1023",
        ge=0,
        le=1023,
    )
    head_ip: str | None = _option(
        None,
        "Cluster",
        "Address of the head node.",
        "HEAD_IP",
        expected="an IP address or host name",
        min_length=1,
    )
    worker_ip: str | None = _option(
        None,
        "Cluster",
        "Address at which other nodes reach this node; on this node it wins over HEAD_IP.",
        "WORKER_IP",
        expected="an IP address or host name",
        min_length=1,
    )
    num_gpus: int | None = _option(
        None,
        "Cluster",
        "GPUs that this node offers to Ray; `plan` assumes the same number.",
        "NUM_GPUS",
        flag="--num-gpus",
        expected="a whole number from 0 to 1024",
        ge=0,
        le=1024,
    )
    ray_auth_token: SecretStr | None = _option(
        None,
        "Cluster",
        "Cluster token, the same on every node, with and without Ray.",
        ("RAY_AUTH_TOKEN", "NIBBLE_CLUSTER_TOKEN"),
        secret=True,
        expected="a token",
    )
    cluster_wait_seconds: int = _option(
        300,
        "Cluster",
        "Seconds that `serve` waits for the other nodes.",
        "NIBBLE_CLUSTER_WAIT_SECONDS",
        flag="--cluster-wait-seconds",
        expected="a whole number of seconds from 0 to 86400",
        ge=0,
        le=86400,
    )
    cluster_model: Literal["own", "head"] = _option(
        "own",
        "Cluster",
        "Source of the model on other nodes: `own` (their cache or the Hub) or `head` (the"
        " head's files, verified).",
        "NIBBLE_CLUSTER_MODEL",
        flag="--cluster-model",
        expected="own or head",
    )
    cluster_interface: str | None = _option(
        None,
        "Cluster",
        "Network interface of the cluster's traffic. Default: the one with this node's address.",
        "NIBBLE_CLUSTER_INTERFACE",
        flag="--cluster-interface",
        expected="the name of an interface, such as enp1s0f0np0",
        min_length=1,
        max_length=15,
    )
    cluster_min_gb_per_s: float | None = _option(
        None,
        "Cluster",
        "Lowest accepted bus bandwidth of the all-reduce between nodes, in 10^9 bytes/s."
        " Default: 1 with GPUs, 0.01 without.",
        "NIBBLE_CLUSTER_MIN_GB_PER_S",
        flag="--cluster-min-gb-per-s",
        expected="a number from 0 up",
        ge=0,
        le=100000,
    )

    hf_token: SecretStr | None = _option(
        None,
        "Files",
        "Hugging Face token for gated or private models.",
        "HF_TOKEN",
        secret=True,
        expected="a token",
    )
    download_stall_seconds: int = _option(
        60,
        "Files",
        "Seconds without a byte after which nibble retries a download; after three such"
        " attempts it stops.",
        "NIBBLE_DOWNLOAD_STALL_SECONDS",
        flag="--download-stall-seconds",
        expected="a whole number of seconds from 1 to 3600",
        ge=1,
        le=3600,
    )
    cache_dir: Path | None = _option(
        None,
        "Files",
        "Folder of nibble's state; the image sets /var/cache/nibble.",
        "NIBBLE_CACHE_DIR",
        expected="a folder",
    )
    config: Path | None = _option(
        None,
        "Files",
        "TOML file with any of these options, [args] and [env].",
        "NIBBLE_CONFIG",
        flag="--config",
        expected="a TOML file",
    )

    @field_validator("max_model_len", mode="before")
    @classmethod
    def _human_readable_tokens(cls, value: Any) -> Any:
        tokens = token_count(value)
        return value if tokens is None else tokens

    @field_validator("tq", mode="before")
    @classmethod
    def _turboquant_preset(cls, value: Any) -> Any:
        text = str(value).strip().lower() if value is not None else ""
        if text in ("", "0", "false", "off"):
            return None
        if text in ("1", "true", "on"):
            return TURBOQUANT_DEFAULT
        return text if text.startswith("turboquant_") else f"turboquant_{text}"

    @field_validator("cute_wo_split")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value not in (1, 2, 4, 8):
            raise ValueError("not 1, 2, 4 or 8")
        return value

    @field_validator("head_ip", "worker_ip")
    @classmethod
    def _host(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[\w.:-]+", value, re.ASCII):
            raise ValueError("not an address")
        return value

    @field_validator("ray_auth_token")
    @classmethod
    def _usable_token(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch(r"[\x21-\x7e]+", value.get_secret_value()):
            raise ValueError("with blanks or control characters")
        return value

    @field_validator("api_key")
    @classmethod
    def _usable_key(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch(r"[\x21-\x7e]{8,}", value.get_secret_value()):
            raise ValueError("too short, or with blanks or control characters")
        return value


def token_count(value: Any) -> int | None:
    """A number of tokens written as 32768 or 32K; None for anything else.

    The suffixes are those of vLLM's flag: k = 1000, K = 1024 (vllm 0.32 argparse_utils.py:29).
    """
    match = re.fullmatch(r"(\d+)([kKmM]?)", str(value).strip())
    if match is None:
        return None
    return int(match[1]) * {"": 1, "k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20}[match[2]]


def option_of(field: FieldInfo) -> Option:
    """The declaration behind a field of Settings."""
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    option = extra["option"]
    assert isinstance(option, Option)
    return option


def options() -> dict[str, Option]:
    """Field name -> declaration, in the order of the docs table."""
    return {name: option_of(field) for name, field in Settings.model_fields.items()}


def default_of(name: str) -> Any:
    """The default of an option by field name."""
    return Settings.model_fields[name].default


def closest(name: str, known: list[str]) -> str:
    """An action that names the nearest known spelling, or where the list is."""
    import difflib

    match = difflib.get_close_matches(name, known, 1, 0.6)
    return f"did you mean {match[0]}?" if match else "see `nibble serve --help`"
