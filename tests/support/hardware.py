"""Machines and cards as nibble detects them."""

from __future__ import annotations

from dataclasses import replace

from nibble.machine.hardware import Gpu, Hardware

GIB = 1 << 30
H200 = Gpu(0, "NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB, "GPU-0")
GB10 = Gpu(0, "NVIDIA GB10", (12, 1), None, None, "GPU-0")

CPU_HOST = Hardware((), None, None, "x86_64", 2, frozenset({"avx2"}), 16 * GIB, 12 * GIB)
HOPPER = Hardware(
    (H200,), "580.105.08", "13.0", "x86_64", 16, frozenset({"avx512f"}), 128 * GIB, 120 * GIB
)
SPARK = replace(HOPPER, gpus=(GB10,), cpu_arch="aarch64")
RTX = Gpu(0, "NVIDIA RTX PRO 6000 Blackwell", (12, 0), 95 * GIB, 94 * GIB, "GPU-0")
SM120 = replace(HOPPER, gpus=(RTX,))
B200 = replace(HOPPER, gpus=(Gpu(0, "NVIDIA B200", (10, 0), 180 * GIB, 178 * GIB, "GPU-0"),))
