"""Variables that older guides and serve scripts set and vLLM 0.32 does not read.

Each has a successor: flags of `vllm serve`, another variable, or a refusal that names it. What a
guide sets never disappears without a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True)
class Successor:
    """What replaces a variable: the flags with the meaning of a value, or None without one.

    `flags` raises ValueError with the expected form for a value that the variable cannot have.
    `variables` are those that get the value instead. `examples` are values that it can have; the
    last one stands in the documentation.
    """

    flags: Callable[[str], dict[str, object] | None]
    note: str = ""
    variables: Callable[[str], dict[str, str]] = field(default=lambda value: {})
    examples: tuple[str, ...] = ("0", "1")


def _flag(name: str, *examples: str) -> Successor:
    return Successor(lambda value: {name: value}, examples=examples or ("1",))


def _upper(name: str, *examples: str) -> Successor:
    return Successor(lambda value: {name: value.upper()}, examples=examples)


def _number(name: str, *examples: str) -> Successor:
    return Successor(lambda value: {name: _whole(value)}, examples=examples)


def _whole(value: str) -> int:
    if not value.strip().isdecimal():
        raise ValueError("a whole number")
    return int(value)


def _is_on(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "on")


def _when_on(flags: dict[str, object], note: str = "") -> Successor:
    return Successor(lambda value: flags if _is_on(value) else {}, note)


def _gone(note: str, example: str = "1") -> Successor:
    return Successor(lambda value: None, note, examples=(example,))


def _needless(note: str, example: str) -> Successor:
    return Successor(lambda value: {}, note, examples=(example,))


def _kernel_of_another_project(note: str) -> Successor:
    """A switch: off has no effect, and on is a refusal."""
    off = ("0", "false", "no", "off", "auto")
    return Successor(lambda value: {} if value.strip().lower() in off else None, note)


def _drafts(value: str) -> dict[str, object]:
    if not (count := _whole(value)):
        return {}
    return {"--speculative-config": {"method": "mtp", "num_speculative_tokens": count}}


def _compilation(value: str) -> dict[str, object]:
    """vLLM 0.32 calls the level `mode`."""
    try:
        config = json.loads(value)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ValueError("a JSON object")
    if "level" in config:
        config.setdefault("mode", config.pop("level"))
    if isinstance(mode := config.get("cudagraph_mode"), str):
        config["cudagraph_mode"] = mode.upper()
    return {"--compilation-config": config}


def _profiler(value: str) -> dict[str, object]:
    return {"--profiler-config": {"profiler": "torch", "torch_profiler_dir": value}}


def _log_level(value: str) -> dict[str, str]:
    # Other programs use the same name with other levels, such as `trace`.
    level = value.strip().upper()
    return {"VLLM_LOGGING_LEVEL": level} if level in LOG_LEVELS else {}


_AUTOMATIC = "0 means vLLM's automatic choice"
_BESIDE = "nibble runs the vLLM beside it"

# None of these names occurs in vllm 0.32's envs.py (a test compares with the schema of the
# installed package). In the order of application: a name that sets a backend wins over a switch.
DEAD_VARIABLES: Mapping[str, Successor] = {
    "VLLM_USE_FLASHINFER_MOE_FP4": _when_on({"--moe-backend": "flashinfer_cutlass"}, _AUTOMATIC),
    "VLLM_USE_FLASHINFER_MOE_FP8": _when_on({"--moe-backend": "flashinfer_cutlass"}, _AUTOMATIC),
    "VLLM_USE_FLASHINFER_MOE_FP16": _when_on({"--moe-backend": "flashinfer_cutlass"}, _AUTOMATIC),
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": _when_on(
        {"--moe-backend": "flashinfer_trtllm"}, _AUTOMATIC
    ),
    "VLLM_FLASHINFER_MOE_BACKEND": Successor(
        lambda value: {
            "--moe-backend": {
                "throughput": "flashinfer_cutlass",
                "latency": "flashinfer_trtllm",
            }.get(value, value)
        },
        examples=("throughput", "latency"),
    ),
    # This one forces the MoE backend, VLLM_NVFP4_GEMM_BACKEND that of dense layers.
    "VLLM_TEST_FORCE_FP8_MARLIN": _when_on({"--moe-backend": "marlin"}, "0 forced nothing"),
    "VLLM_USE_NVFP4_CT_EMULATIONS": _when_on({"--linear-backend": "emulation"}, "0 forced nothing"),
    "VLLM_NVFP4_GEMM_BACKEND": Successor(
        lambda value: {"--linear-backend": value.lower().replace("-", "_")},
        examples=("cutlass", "marlin"),
    ),
    "VLLM_ATTENTION_BACKEND": _upper("--attention-backend", "FLASHINFER", "TRITON_ATTN"),
    "VLLM_USE_TRTLLM_ATTENTION": Successor(
        lambda value: {"--attention-config": {"use_trtllm_attention": _is_on(value)}}
    ),
    "VLLM_TORCH_PROFILER_DIR": Successor(_profiler, examples=("/tmp/traces",)),
    "VLLM_USE_V1": Successor(
        lambda value: {} if value.strip() == "1" else None, "vLLM has only the V1 engine"
    ),
    "VLLM_VERSION": _needless(_BESIDE, "0.15.1"),
    "VLLM_PYTHON": _gone(_BESIDE, "/usr/bin/python3"),
    "VLLM_BIN": _gone(_BESIDE, "/usr/bin/vllm"),
    "VLLM_NVFP4_SPARSE_V7": _gone(
        "vLLM has no 2:4 sparse NVFP4 kernel; NIBBLE_SPARSE_FP4=on with NIBBLE_LINEAR_KERNEL=nibble"
        " is nibble's"
    ),
    "VLLM_RPC_TIMEOUT": _gone("vLLM 0.32 has no multiprocessing front end"),
    "VLLM_MEMORY_PROFILE_INCLUDE_ATTN": _gone("memory profiling always includes attention"),
    "VLLM_SLEEP_WHEN_IDLE": _gone("vLLM 0.32 has no such setting"),
    # Of serve scripts; vLLM never read these.
    "ATTENTION_BACKEND": _upper("--attention-backend", "FLASHINFER", "TRITON_ATTN"),
    "COMPILATION_CONFIG": Successor(
        _compilation, examples=('{"mode": 0}', '{"level": 3, "cudagraph_mode": "full"}')
    ),
    "DTYPE": _flag("--dtype", "auto", "bfloat16"),
    "KV_CACHE_DTYPE": _flag("--kv-cache-dtype", "auto", "fp8"),
    "MAX_NUM_BATCHED_TOKENS": _number("--max-num-batched-tokens", "8192"),
    "QUANTIZATION": _flag("--quantization", "compressed-tensors", "modelopt_fp4"),
    "SPEC_TOKENS": Successor(_drafts, "0 means no drafts", examples=("0", "1", "2")),
    "MTP_TOKENS": Successor(_drafts, "0 means no drafts", examples=("0", "1", "2")),
    "STREAM_INTERVAL": _number("--stream-interval", "5"),
    "LOG_LEVEL": Successor(
        lambda value: {},
        "vLLM has other log levels",
        variables=_log_level,
        examples=("trace", "info", "DEBUG"),
    ),
    "SWAP_SPACE": _needless("vLLM's V1 engine recomputes a preempted request", "16"),
    "GPU_POWER_LIMIT": _gone("nibble sets no power limit; `nvidia-smi -pl WATTS` does", "270"),
    "NVLLM_MIN_FREE_GB": _needless(
        "the plan compares what the model needs with what is free; NIBBLE_MEMORY_RESERVE_GIB keeps"
        " more",
        "90",
    ),
    "CUTE_BETA_MIN_FREE_GB": _needless("it belongs to kernels that nibble does not have", "8"),
    "NVLLM_SKIP_MEM_CHECK": _kernel_of_another_project(
        "NIBBLE_MEMORY_RESERVE_GIB=0 keeps nothing back"
    ),
    "NVLLM_TORCH_PROFILER": _kernel_of_another_project("`nibble trace` records a profile"),
}

# Every other switch of nvllm's kernels and scripts. CUTE_DSL_* belong to NVIDIA's CUTLASS, and
# CUTE_WO_SPLIT is an option.
_FAMILY = re.compile(r"CUTE_(?!DSL_|WO_SPLIT$)[A-Z0-9_]+|NVLLM_[A-Z0-9_]+")
_OF_NVLLM = _kernel_of_another_project("it belongs to nvllm, whose kernels nibble does not have")


def successor_of(name: str) -> Successor | None:
    """What replaces the variable `name`, or None if it is not one of an older guide."""
    if name in DEAD_VARIABLES:
        return DEAD_VARIABLES[name]
    return _OF_NVLLM if _FAMILY.fullmatch(name) else None
