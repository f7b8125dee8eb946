"""Tools for tests of GPU code, fetched once from the package index: NVIDIA's disassembler, and
the cmake of the image builds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from nibble.machine.paths import root
from tests.support.once import once
from tests.support.releases.trees import CACHE

CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
NVCC = CUDA / "bin/nvcc"
# Conversions to FP4 and tensor core instructions for 120f, of vLLM 0.32.0: in the released wheel
# and as compiled by CUDA 13.0.
GB10_INSTRUCTIONS = {
    "nvfp4_quant_kernels": {"F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C": 48},
    "activation_nvfp4_quant_fusion_kernels": {"F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C": 16},
    "nvfp4_experts_quant": {"F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C": 64},
    "nvfp4_kv_cache_kernels": {"F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C": 64},
    "nvfp4_scaled_mm_sm120_kernels": {"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": 384},
    "nvfp4_blockwise_moe_kernel": {"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": 64},
    "scaled_mm_sm120_fp8": {"QMMA.16832.F32.E4M3.E4M3": 1024},
    "scaled_mm_blockwise_sm120_fp8": {"QMMA.16832.F32.E4M3.E4M3": 576},
    "sm80_kernel_float16_fe2m1f_float16": {"HMMA.16816.F32": 2016},
    "sm80_kernel_bfloat16_fe2m1f_bfloat16": {"HMMA.16816.F32.BF16": 2736},
}
DISASSEMBLER = """\
nvidia-cuda-cuobjdump==13.5.37 \\
    --hash=sha256:38780fee50863252a0b8926357faa91615ca1c8346490563f33a06100cd73f58 \\
    --hash=sha256:f48e3148535365161a268547b285fd01d92c80e4b457275375933825b5fc26b2
nvidia-cuda-nvdisasm==13.5.37 \\
    --hash=sha256:d3fdbdd49fa53e2e4aacd3db8259d052bd2b049ececdcb69e92e083c6728e7ca \\
    --hash=sha256:a3a8248074edb9fba63b74c38a5416b712a91ab09e70b8ab37186c3d293fc605
"""


def gb10_instructions(path: Path) -> dict[str, int]:
    """Conversions to FP4 and tensor core instructions in an object or a .cubin."""
    tools = disassembler()
    environ = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    words = [tools / "cuobjdump", "-sass", path]
    text = subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\s(F2FP\.[A-Z0-9_.]*E2M1[A-Z0-9_.]*|[HOQ]MMA\.[A-Z0-9.]*)\s", text)
    return dict(Counter(found))


def disassembler() -> Path:
    """The folder that holds cuobjdump and nvdisasm."""
    return _installed("cuobjdump", DISASSEMBLER) / "nvidia/cu13/bin"


def cmake() -> Path:
    """The cmake that docker/steps/vllm_build.lock pins; vLLM's CMakeLists.txt wants 3.26 or
    newer.
    """
    lock = (root() / "docker/steps/vllm_build.lock").read_text()
    entry = re.search(r"^cmake==(.*\\\n)+.*\n", lock, re.MULTILINE)
    assert entry, "vllm_build.lock has no cmake"
    return _installed("cmake", entry[0]) / "cmake/data/bin/cmake"


def _installed(name: str, lock: str) -> Path:
    def install(folder: Path) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(lock)
            file.flush()
            words = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--require-hashes",
                "--target",
            ]
            subprocess.run([*words, str(folder), "-r", file.name], check=True)

    return once(CACHE.parent / "tools" / name, install)
