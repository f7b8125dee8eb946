"""Prints the TORCH_CUDA_ARCH_LIST of a target from <target>.toml in TARGETS_DIR (default
/targets).
"""

import os
import sys
import tomllib
from pathlib import Path


def arch_list(target: str, folder: Path) -> str:
    data = tomllib.loads((folder / f"{target}.toml").read_text())
    value = data.get("torch_cuda_arch_list") or data.get("build", {}).get("torch_cuda_arch_list")
    if not isinstance(value, str) or not value:
        sys.exit(f"error: {folder}/{target}.toml has no torch_cuda_arch_list")
    return value


if __name__ == "__main__":
    print(arch_list(sys.argv[1], Path(os.environ.get("TARGETS_DIR", "/targets"))))
