"""Stage `flashinfer`: compiles FlashInfer's sampling kernels for a target's GPUs into the installed
package.

usage: build_flashinfer.py TARGET [FOLDER] (FOLDER replaces the package's data/aot)

vLLM uses them in the last warm-up of every start on a GPU. Without this stage a first start waits a
minute for nvcc (an H200's log is in tests/unit/data). FlashInfer looks into data/aot before it
starts a compiler (flashinfer 0.7.0.post1 jit/env.py:269). The architectures are the target's
capabilities; FlashInfer adds their suffixes, as it does for a GPU.
"""

import os
import shutil
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

# cuRAND's headers from torch's wheels, for a base image whose toolkit has none.
HEADERS = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/include"


def main(target: str, folder: Path | None) -> None:
    data = tomllib.loads(
        (Path(os.environ.get("TARGETS_DIR", "/targets")) / f"{target}.toml").read_text()
    )
    os.environ["NVCC_APPEND_FLAGS"] = (
        f"{os.environ.get('NVCC_APPEND_FLAGS', '')} -I{HEADERS}".lstrip()
    )
    os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(data["capabilities"])
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FLASHINFER_WORKSPACE_BASE"] = scratch
        # FlashInfer reads both variables when it is imported.
        from flashinfer.jit import env, sampling  # pyright: ignore[reportMissingImports]

        module = sampling.gen_sampling_module()
        try:
            module.build()
        except RuntimeError as error:
            print(str(error)[-2000:], file=sys.stderr)
            sys.exit(
                f"error: FlashInfer's sampling kernels were not compiled for {target}; try: a base"
                " image with CUDA 13.0-devel"
            )
        into = (folder or env.FLASHINFER_AOT_DIR) / module.name
        into.mkdir(parents=True)
        shutil.copy(module.jit_library_path, into)
        print(f"{into}: {', '.join(data['capabilities'])}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else None)
