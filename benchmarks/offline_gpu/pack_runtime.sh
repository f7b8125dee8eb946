#!/usr/bin/env bash
# pack_runtime.sh PARTS_DIR: pack the packages for an SM90 machine that has only CUDA 13.0 and Python 3.12.
set -euo pipefail
parts=$(realpath -m "$1")
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# Without the lock's versions, because pip cannot resolve all of them for these platforms.
python3 "${repo}/benchmarks/offline_gpu/gpu_runtime.py" "${parts}" \
  --with "ray[default]==2.60.0" huggingface-hub==2.4.0 pydantic-settings nvidia-ml-py typer rich
"${repo}/benchmarks/offline_gpu/pack_nibble.sh" "${parts}"
