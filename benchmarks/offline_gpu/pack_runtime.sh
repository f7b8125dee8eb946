#!/usr/bin/env bash
# pack.sh PARTS_DIR: what a bare SM90 machine with CUDA 13.0 and Python 3.12 needs. Reads ../shared/tools beside the repository.
set -euo pipefail
parts=$(realpath -m "$1")
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# Without the lock's versions: for the platforms pip is told of, it finds no resolution that has them all.
python3 "${repo}/../shared/tools/pack_gpu_runtime.py" "${parts}" \
  --with "ray[default]==2.60.0" huggingface-hub==2.4.0 pydantic-settings nvidia-ml-py typer rich
"${repo}/benchmarks/offline_gpu/pack_nibble.sh" "${parts}"
