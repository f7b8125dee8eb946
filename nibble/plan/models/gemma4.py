"""Attention of Gemma 4 on GB10 and SM120, where vLLM 0.32 uses TRITON_ATTN for all layers.

The sliding-window layers have heads of 256, the others of 512. FlashAttention 4 supports both but
has no kernels for SM12x, so model_executor/models/config.py:283 sets TRITON_ATTN.
`--gemma4-attention` selects another backend with vLLM's flags. It has not been measured on SM12x.
With FlashAttention 2 for the sliding layers, decoding was 8 to 12 % slower than with Triton alone
on A100 and RTX 3090 (vllm#48114), so the default is off.
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

# Causal architectures to which vllm 0.32 model_executor/models/config.py:1075 gives that backend.
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
    """Whether FlashInfer has prebuilt kernels here or can compile them: with ninja, and nvcc in the
    place where jit/cpp_ext.py:48 looks.
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
    """Refuse the option if vLLM 0.32 would not accept it. `can_compile` is None for another
    machine's plan. Raises CONFIG.
    """
    backend = settings.gemma4_attention
    if backend == "triton":
        return
    if target.name not in TARGETS:
        raise _refusal(
            backend, f"on {target.name}, where vLLM takes FlashAttention 4", "gb10 or sm120"
        )
    if backend == "flashinfer" and can_compile is False:
        raise _refusal(
            backend,
            "without nvcc and ninja, which build its kernels",
            "a CUDA toolkit of at least 12.9",
        )
    if checkpoint is None:
        return
    if checkpoint.architecture not in ARCHITECTURES:
        raise _refusal(
            backend, f"for {checkpoint.id} ({checkpoint.architecture})", "a Gemma 4 model"
        )
    cache = str(args.get("--kv-cache-dtype") or "auto")
    cache = str(checkpoint.scheme.kv_cache or cache) if cache == "auto" else cache
    if backend == "per-layer" and cache not in ("auto", "bfloat16", "float16"):
        where = f"with a KV cache of {cache}, which FlashAttention 2 cannot read"
        expected = "--kv-cache-dtype bfloat16, or --gemma4-attention flashinfer"
        raise _refusal(backend, where, expected)
    sees_images = checkpoint.text_config.get("use_bidirectional_attention") == "vision"
    if sees_images and not _is_text_only(args):
        # On SM12x only TRITON_ATTN has supports_mm_prefix()
        # (vllm 0.32 model_arch_config_convertor.py:769).
        raise _refusal(
            backend, "with images, whose tokens attend to each other", "--language-model-only"
        )


def _is_text_only(args: Mapping[str, Any]) -> bool:
    limits = args.get("--limit-mm-per-prompt")
    are_others_off = isinstance(limits, Mapping) and all(
        limits.get(kind) == 0 for kind in ("image", "video")
    )
    return args.get("--language-model-only") is True or are_others_off


def _refusal(backend: str, where: str, expected: str) -> NibbleError:
    what = f"--gemma4-attention {backend} does not work {where}"
    return NibbleError(
        ExitCode.CONFIG,
        what=what,
        expected=expected,
        action="drop --gemma4-attention and NIBBLE_GEMMA4_ATTENTION",
    )
