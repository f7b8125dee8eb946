#!/usr/bin/env bash
# The canary of twelve layers of Qwen3-30B-A3B's shape with vLLM's and with nibble's experts, each alone on the GPU.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 OMP_NUM_THREADS=8
export NIBBLE_CANARY=warn NIBBLE_KERNEL_ASSERTION=warn NIBBLE_REFERENCE=off NIBBLE_KV_CACHE_BYTES=$((1 << 30)) MAX_MODEL_LEN=4096
export PORT=9401 NIBBLE_CONTROL_PORT=9402
model=/tmp/shapes/30b-12
step experts_canary_write 100 python3 - <<'PYTHON'
import sys
from pathlib import Path
sys.path[:0] = ["/tmp/repo", "/tmp/repo/benchmarks"]
from host_floor import write_shape
write_shape(Path("/tmp/shapes/30b-12"), "30b-a3b", 12)
PYTHON
ask() {
  local name=$1 kernel=$2
  shift 2
  NIBBLE_MOE_KERNEL=${kernel} python3 -m nibble serve "${model}" "$@" >"/tmp/R/server_experts_${name}.log" 2>&1 &
  local server=$!
  for ((i = 0; i < 240; i++)); do
    curl -sf "http://127.0.0.1:${NIBBLE_CONTROL_PORT}/ready" >/dev/null && break
    kill -0 "${server}" || break
    sleep 1
  done
  step "experts_canary_${name}" 10 curl -sf "http://127.0.0.1:${NIBBLE_CONTROL_PORT}/status"
  kill -TERM "${server}"
  wait "${server}"
}
ask vllm vllm
ask nibble nibble
touch /tmp/R/experts_canary.done
