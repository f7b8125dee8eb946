"""The folders of compiled code in a plan, each keyed by what it depends on. Pure.

A plan has two entries: kernels compiled for this build on this GPU, for all models; and graphs
compiled for one model with the flags that shape them. vLLM, Triton and FlashInfer have finer keys
inside an entry. nibble's key says what an entry belongs to, so that it can be listed, verified and
pruned as a whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nibble.checkpoint import Checkpoint
from nibble.machine.hardware import Hardware
from nibble.machine.targets import Target
from nibble.plan.choice import Choice, Choices

FOLDER = "engine"  # in nibble's cache
Kind = Literal["kernels", "graphs"]

# Flags that do not change compiled code: the API server, text in and out, and memory limits that
# depend on what is free at the moment. A missing flag costs a compilation; a wrong one makes an
# entry serve two settings.
_OUTSIDE_FLAGS = """
host port uds api-server-count served-model-name middleware root-path shutdown-timeout
fail-on-environ-validation revision code-revision tokenizer tokenizer-revision tokenizer-mode
chat-template chat-template-content-format default-chat-template-kwargs generation-config
override-generation-config reasoning-parser tool-call-parser enable-auto-tool-choice tool-server
max-log-len uvicorn-log-level log-config-file enable-log-requests disable-log-stats
disable-access-log-for-endpoints otlp-traces-endpoint max-num-queued-reqs max-num-queued-tokens
enable-prompt-tokens-details enable-force-include-usage kv-cache-memory-bytes
gpu-memory-utilization load-format safetensors-load-strategy safetensors-prefetch-num-threads
model-loader-extra-config max-parallel-loading-workers enable-flashinfer-autotune
"""
OUTSIDE_FLAGS = frozenset("--" + name for name in _OUTSIDE_FLAGS.split())


@dataclass(frozen=True)
class CacheKey:
    """What one entry depends on. `parts` are text, in the order in which they are shown."""

    kind: Kind
    parts: Mapping[str, str]

    @property
    def name(self) -> str:
        """The entry's folder name: the kind and 16 hex digits."""
        text = json.dumps([self.kind, dict(sorted(self.parts.items()))])
        return f"{self.kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class CachePlan:
    """The entries of a plan below `root`; no `keys` if the build is unknown."""

    root: Path
    keys: tuple[CacheKey, ...] = ()

    def folder(self, kind: Kind) -> Path:
        """The folder of the entry of that kind."""
        return self.root / next(key.name for key in self.keys if key.kind == kind)


def plan_caches(
    cache: Path,
    build: str,
    vllm: str,
    target: Target,
    hardware: Hardware,
    checkpoint: Checkpoint | None,
    model: str,
    args: Mapping[str, Choice],
) -> CachePlan:
    """The entries for this build, hardware, model and flags. Another machine's plan has no `build`
    and no entries.
    """
    root = cache / FOLDER
    if not build:
        return CachePlan(root)
    shared = {"build": build, "vllm": vllm, "arch": architecture(target, hardware)}
    flags = {
        name: _plain(choice.value) for name, choice in args.items() if name not in OUTSIDE_FLAGS
    }
    model_parts = {"model": _model(checkpoint, model), "flags": json.dumps(flags, sort_keys=True)}
    return CachePlan(root, (CacheKey("kernels", shared), CacheKey("graphs", shared | model_parts)))


def architecture(target: Target, hardware: Hardware) -> str:
    """What machine code depends on: GPU and compute capability, or the CPU's vector
    instructions.
    """
    if target.device == "cpu":
        # Inductor compiles C++ for this CPU's instructions; on another CPU the code could end with
        # SIGILL.
        vector_flags = sorted(
            flag for flag in hardware.cpu_flags if flag.startswith(("avx", "amx", "sve", "asimd"))
        )
        return (
            f"{hardware.cpu_arch} {hashlib.sha256(' '.join(vector_flags).encode()).hexdigest()[:8]}"
        )
    gpus = {f"sm_{gpu.capability[0]}{gpu.capability[1]} {gpu.name}" for gpu in hardware.gpus}
    return ", ".join(sorted(gpus)) or target.name


def _model(checkpoint: Checkpoint | None, model: str) -> str:
    if checkpoint is None:
        return model
    if checkpoint.revision:
        return f"{checkpoint.id}@{checkpoint.revision}"
    config = json.dumps(checkpoint.config, sort_keys=True, default=str)
    return f"{checkpoint.where} {hashlib.sha256(config.encode()).hexdigest()[:12]}"


def _plain(value: Any) -> Any:
    return (
        value if isinstance(value, (str, int, float, bool, list, dict, type(None))) else str(value)
    )


def cache_environment(caches: CachePlan, target: Target) -> Choices:
    """Variables that direct all compiled code into the plan's entries."""
    if not caches.keys:
        return {}
    kernels, graphs = caches.folder("kernels"), caches.folder("graphs")
    source = "nibble's default"
    own = "graphs compiled for this model, GPU and these flags"
    shared = "kernels compiled for this GPU, the same for every model"
    env: Choices = {
        "VLLM_CACHE_ROOT": Choice(
            str(graphs / "vllm"), source, f"{own}: torch.compile, autotune results"
        ),
        # vLLM moves its own folder (vllm 0.32 compilation/decorators.py:580); this one is for code
        # that is compiled outside of the model.
        "TORCHINDUCTOR_CACHE_DIR": Choice(
            str(graphs / "inductor"), source, f"{own}: torch.compile outside vLLM"
        ),
        "TRITON_CACHE_DIR": Choice(str(kernels / "triton"), source, f"{shared}: Triton's"),
    }
    if target.device == "cuda":
        env |= {
            # flashinfer 0.7.0.post1 jit/env.py:66 adds .cache/flashinfer itself.
            "FLASHINFER_WORKSPACE_BASE": Choice(str(kernels), source, f"{shared}: FlashInfer's"),
            "HUMMING_CACHE_DIR": Choice(str(kernels / "humming"), source, f"{shared}: Humming's"),
            "CUDA_CACHE_PATH": Choice(
                str(kernels / "cuda"), source, f"{shared}: the driver's, compiled from PTX"
            ),
        }
    return env


# Folders below NIBBLE_CACHE_DIR that docker/Dockerfile.* set for other programs in the image.
# docker/start.sh compares with them too: these values are not the user's.
_IMAGE_FOLDERS = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": ".",
    "CUDA_CACHE_PATH": "cuda",
}


def is_preset_folder(name: str, value: str, cache: Path, in_image: bool) -> bool:
    """Whether a cache variable is empty, as in Compose files, or has the image's value."""
    if name not in _IMAGE_FOLDERS:
        return False
    return not value or (in_image and Path(value) == cache / _IMAGE_FOLDERS[name])
