#!/usr/bin/env bash
# Qwen3-30B-A3B's shape through both servers, with what `auto` takes; LOAD_KERNELS names other kernels.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} FLASHINFER_WORKSPACE_BASE=/tmp/load_flashinfer LOAD_FIRST_PORT=9121
mkdir -p /tmp/R/experts_load /tmp/shapes "${FLASHINFER_WORKSPACE_BASE}"
if [[ ! -e /tmp/shapes/30b-a3b/config.json ]]; then
  step experts_write 200 python3 benchmarks/serve_load.py --shape 30b-a3b --write /tmp/begun_30b
  mv -nT /tmp/begun_30b /tmp/shapes/30b-a3b
fi
for kernel in ${LOAD_KERNELS:-auto}; do
  NIBBLE_MOE_KERNEL=${kernel} step "experts_load_${kernel}" 400 python3 benchmarks/serve_load.py --model /tmp/shapes/30b-a3b \
    --measure-s "${LOAD_MEASURE_S:-60}" --logs /tmp/R/experts_load --commit "${COMMIT}" --out "/tmp/R/serve_load_30b_a3b_${kernel}.json"
done
touch /tmp/R/experts_load.done
