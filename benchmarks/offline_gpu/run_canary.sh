#!/usr/bin/env bash
# The canary, strict, with and without steps from CUDA graphs: random weights in W4A4, and both demos.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
cores=$(nproc)
[[ -n ${LANE_GPU:-} ]] || taskset -p -c "$((cores * 5 / 8))-$((cores * 6 / 8 - 1))" $$
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-$((gpus > 1))} GPU_MEMORY_UTIL=0.2 NIBBLE_KV_CACHE_BYTES=$((2 << 30)) VLLM_NO_USAGE_STATS=1
export OMP_NUM_THREADS=4
ask() {
  local name=$1 model=$2
  shift 2
  step "${name}" 480 python3 benchmarks/offline_gpu/ask_real_model.py "${model}" "/tmp/R/server_${name}.log" "$@"
}
until [[ -e /tmp/shapes/dense2/config.json ]]; do sleep 0.5; done
for round in 1 2 3; do
  for graphs in on off; do
    ask "canary_dense2_${graphs}_${round}" /tmp/shapes/dense2 VLLM_USE_FLASHINFER_SAMPLER=0 NIBBLE_STEP_GRAPH=${graphs}
  done
  if ((round == 1)); then
    for demo in nibble-demo-nvfp4 nibble-demo-moe-nvfp4; do
      ask "canary_${demo}" "models/${demo}" VLLM_USE_FLASHINFER_SAMPLER=0
    done
    step fault 480 env CUDA_LOG_FILE=stderr VLLM_USE_FLASHINFER_SAMPLER=0 NIBBLE_CANARY=off python3 benchmarks/step_graph_fault.py --out /tmp/R/fault.json
    # With FlashInfer's sampler, which compiles for a minute.
    ask canary_smollm2 /tmp/real_model/smollm2-135m-instruct-nvfp4
  fi
done
touch /tmp/R/canary.done
