"""Stage `flashinfer-commands`: writes the commands (build.ninja) that compile FlashInfer's sampling
kernels for a target's GPUs; compile_flashinfer.sh runs them on the build machine's own processor.

usage: build_flashinfer.py TARGET FOLDER

vLLM uses them in the last warm-up of every start on a GPU. Without this stage a first start waits a
minute for nvcc (an H200's log is in tests/unit/data). FlashInfer looks into data/aot before it
starts a compiler (flashinfer 0.7.0.post1 jit/env.py:269). The architectures are the target's
capabilities; FlashInfer adds their suffixes, as it does for a GPU.
"""

import os
import platform
import sys
import sysconfig
import tomllib
from pathlib import Path

# cuRAND's headers from torch's wheels, for a base image whose toolkit has none. -isystem: the
# toolkit's own headers, which belong to its nvcc, come first.
HEADERS = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/include"


def main(target: str, folder: Path) -> None:
    data = tomllib.loads(
        (Path(os.environ.get("TARGETS_DIR", "/targets")) / f"{target}.toml").read_text()
    )
    compiler = f"{platform.machine()}-linux-gnu-g++"
    os.environ |= {
        "CC": compiler,  # nvcc's host compiler
        "CXX": compiler,
        "CUDA_HOME": os.environ.get("CUDA_HOME", "/usr/local/cuda"),
        "FLASHINFER_CUDA_ARCH_LIST": " ".join(data["capabilities"]),
        "FLASHINFER_EXTRA_CUDAFLAGS": f"-isystem {HEADERS}",
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{folder}/link",
        "FLASHINFER_WORKSPACE_BASE": str(folder),
    }
    # FlashInfer reads these variables when it is imported.
    from flashinfer.jit import sampling  # pyright: ignore[reportMissingImports]

    sampling.gen_sampling_module().write_ninja()
    print(f"{folder}: {', '.join(data['capabilities'])}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
