"""Attention of Gemma 4 on GB10 and SM120, where vLLM 0.32 takes TRITON_ATTN for all layers.

Its sliding-window layers have heads of 256, the others of 512; FlashAttention 4, which takes both,
has no kernels for SM12x, so that model_executor/models/config.py:283 sets TRITON_ATTN.
`--gemma4-attention` sets another backend with vLLM's own flags. It is not measured on SM12x;
with FlashAttention 2 for the sliding layers decoding was 8 to 12 % slower than all Triton on A100
and RTX 3090 (vllm#48114), so that it is off by default.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.errors import ExitCode, NibbleError
from nibble.machine.targets import Target
from nibble.settings.options import Settings

# Those that vllm 0.32 model_executor/models/config.py:1075 gives that backend and that are causal.
ARCHITECTURES = (
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
)
TARGETS = ("gb10", "sm120")
FLAGS: Mapping[str, Mapping[str, Any]] = {
    "triton": {},
    "per-layer": {"--attention-config": {"backend_per_kind": {"sliding_window": "FLASH_ATTN"}}},
    "flashinfer": {"--attention-backend": "FLASHINFER"},
}
REASON = "Gemma 4 attention set by the user; unmeasured on SM12x"


def has_flashinfer_compiler(environ: Mapping[str, str]) -> bool:
    """Whether FlashInfer can make its kernels here: nvcc where it looks for it
    (jit/cpp_ext.py:48) and ninja, or prebuilt.
    """
    if find_spec("flashinfer_jit_cache") is not None:
        return True
    search = environ.get("PATH", os.defpath)
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    nvcc = shutil.which(
        "nvcc", path=f"{home}/bin" if home else f"{search}{os.pathsep}/usr/local/cuda/bin"
    )
    return nvcc is not None and shutil.which("ninja", path=search) is not None


def check_gemma4(
    settings: Settings,
    target: Target,
    checkpoint: Checkpoint | None,
    args: Mapping[str, Any],
    can_compile: bool | None,
) -> None:
    """Refuse the option where vLLM 0.32 would not take it. `can_compile` is None for a machine
    that is not here.
    """
    asked = settings.gemma4_attention
    if asked == "triton":
        return
    if target.name not in TARGETS:
        raise _refusal(
            asked, f"on {target.name}, where vLLM takes FlashAttention 4", "gb10 or sm120"
        )
    if asked == "flashinfer" and can_compile is False:
        raise _refusal(
            asked,
            "without nvcc and ninja, which build its kernels",
            "a CUDA toolkit of at least 12.9",
        )
    if checkpoint is None:
        return
    if checkpoint.architecture not in ARCHITECTURES:
        raise _refusal(asked, f"for {checkpoint.id} ({checkpoint.architecture})", "a Gemma 4 model")
    cache = str(args.get("--kv-cache-dtype") or "auto")
    cache = str(checkpoint.scheme.kv_cache or cache) if cache == "auto" else cache
    if asked == "per-layer" and cache not in ("auto", "bfloat16", "float16"):
        raise _refusal(asked, f"with a KV cache of {cache}, which FlashAttention 2 cannot read",
                       "--kv-cache-dtype bfloat16, or --gemma4-attention flashinfer")  # fmt: skip
    if checkpoint.text_config.get("use_bidirectional_attention") == "vision" and not _is_text_only(
        args
    ):
        # vllm 0.32 model_arch_config_convertor.py:769; on SM12x only TRITON_ATTN has
        # supports_mm_prefix().
        raise _refusal(asked, "with images, whose tokens see each other", "--language-model-only")


def _is_text_only(args: Mapping[str, Any]) -> bool:
    limits = args.get("--limit-mm-per-prompt")
    none_left = isinstance(limits, Mapping) and all(
        limits.get(kind) == 0 for kind in ("image", "video")
    )
    return args.get("--language-model-only") is True or none_left


def _refusal(asked: str, where: str, expected: str) -> NibbleError:
    what = f"--gemma4-attention {asked} does not work {where}"
    return NibbleError(
        ExitCode.CONFIG,
        what=what,
        expected=expected,
        action="drop --gemma4-attention and NIBBLE_GEMMA4_ATTENTION",
    )
