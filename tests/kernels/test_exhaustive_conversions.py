"""All 2^32 floats, on the GPU, against CUDA's own conversions."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.kernels.kernel_build import KERNELS, cuda_targets

PROGRAM = Path(__file__).with_name("exhaustive_conversions.cu")


@pytest.mark.gpu
def test_every_float_converts_as_in_cudas_headers(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if not nvcc:
        pytest.skip("no nvcc here")
    arch = cuda_targets().replace(".", "")
    words = [
        nvcc,
        "-O3",
        "-std=c++20",
        "-fmad=false",
        "--expt-relaxed-constexpr",
        f"-I{KERNELS}/src/nibble_kernels/include",
    ]
    words += [
        f"-gencode=arch=compute_{arch},code=sm_{arch}",
        "-o",
        str(tmp_path / "exhaustive"),
        str(PROGRAM),
    ]
    subprocess.run(words, check=True)
    found = json.loads(
        subprocess.run([tmp_path / "exhaustive"], capture_output=True, text=True, check=True).stdout
    )
    print(torch.cuda.get_device_name(), found)
    assert found["floats"] == 2**32
    assert set(found["mismatches"].values()) == {0}
