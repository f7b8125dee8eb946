#!/usr/bin/env bash
# The cost of gate and request guard, and the guard's tests with a real server.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} OMP_NUM_THREADS=4 PYTHONPATH=${PYTHONPATH}:benchmarks/offline_gpu:benchmarks VLLM_USE_FLASHINFER_SAMPLER=0
export GPU_MEMORY_UTIL=0.2 NIBBLE_KV_CACHE_BYTES=$((1 << 30))
rate() {
  PORT=8100 NIBBLE_CONTROL_PORT=8101 NIBBLE_CACHE_DIR=/tmp/rate NIBBLE_REFERENCE=off ./entrypoint.sh serve nibble-demo-nvfp4 &
  until python3 -c 'import urllib.request as u; u.urlopen("http://127.0.0.1:8101/ready")' 2>/dev/null; do sleep 0.5; done
  python3 benchmarks/gate_cost.py --rate http://127.0.0.1:8100 --out /tmp/R/gate_cost.json
  kill %1
  wait
}
step gate_cost 150 taskset -c 0-3 python3 benchmarks/gate_cost.py --pairs 1000 --repeats 5 --out /tmp/R/gate_cost.json
step rate 150 bash -c "$(declare -f rate); rate"
step guard 400 python3 -m pytest -p no:cacheprovider -p instant -v --slow --tb=short tests/e2e/test_request_guard.py tests/e2e/test_structured_outputs.py
touch /tmp/R/gate.done
