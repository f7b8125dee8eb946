#!/usr/bin/env bash
# pack_cpu_runtime.sh PARTS_DIR: pack vLLM's CPU runtime, nibble, its kernels and llama.cpp for the lane cpu_llama.
set -euo pipefail
parts=$(realpath -m "$1")
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PATH=${repo}/.venv/bin:${PATH} python "${repo}/benchmarks/offline_gpu/cpu_runtime.py" "${parts}"
