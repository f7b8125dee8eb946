#!/usr/bin/env bash
# Time between tokens and to the first token beside stock vLLM, on the first GPU.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
# The lanes host, equal and canary have separate cores.
[[ -n ${LANE_GPU:-} ]] || taskset -p -c "0-$(($(nproc) * 3 / 8 - 1))" $$
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} VLLM_NO_USAGE_STATS=1 NIBBLE_CANARY=warn NIBBLE_REFERENCE=off VLLM_USE_FLASHINFER_SAMPLER=0
mkdir -p /tmp/shapes
floor=(python3 benchmarks/host_floor.py)
for shape in 8b 4b 0.6b; do
  (
    step "write_${shape}" 300 "${floor[@]}" --write "/tmp/begun_${shape}" --shapes "${shape}"
    mv "/tmp/begun_${shape}/${shape}" /tmp/shapes/
  ) &
done
measure() {
  local name=$1 shape=$2
  shift 2
  until [[ -e /tmp/shapes/${shape}/config.json ]]; do sleep 0.5; done
  step "${name}" 480 "${floor[@]}" --models /tmp/shapes --shapes "${shape}" --logs /tmp/R --commit "${COMMIT}" --out "/tmp/R/${name}.json" "$@"
}
measure arrivals_8b 8b --arrivals
measure floor_8b 8b --streams 1 8 16
measure floor_hybrid2 hybrid2 --streams 1 8 16 32
measure floor_4b 4b --streams 1 8 16
measure floor_0.6b 0.6b --streams 1 8 16
measure floor_dense2 dense2
touch /tmp/R/host.done
