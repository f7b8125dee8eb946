#!/usr/bin/env bash
# What gate and guard cost; each fault of a model's structure against a computed reference; starts that make and use one, also of an
# 8B model's shape, where the reference is computed beside the load.
set -uo pipefail
# shellcheck source=benchmarks/lease/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=0 OMP_NUM_THREADS=4 PYTHONPATH=${PYTHONPATH}:benchmarks/lease VLLM_USE_FLASHINFER_SAMPLER=0
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
step reference_faults 330 python3 benchmarks/reference_faults.py models/nibble-demo-nvfp4 models/nibble-demo-moe-nvfp4 --out /tmp/R/reference_faults.json &
step reference_fp8 200 python3 benchmarks/reference_faults.py models/nibble-demo-nvfp4 --kv-cache-dtype fp8 --out /tmp/R/reference_faults_fp8_cache.json &
step canary 400 python3 -m pytest -p no:cacheprovider -p instant -v --slow --tb=short tests/e2e/test_reference.py --junitxml /tmp/R/reference.xml &
wait
unset GPU_MEMORY_UTIL NIBBLE_KV_CACHE_BYTES OMP_NUM_THREADS
step write_8b 200 python3 benchmarks/start_time.py --write /tmp/8b
for reference in auto off; do
  step "start_8b_${reference}" 300 python3 benchmarks/start_time.py --model /tmp/8b --later 1 --sides nibble --logs "/tmp/R/starts_${reference}" \
    --nibble-env "NIBBLE_REFERENCE=${reference}" --commit "${COMMIT}" --out "/tmp/R/start_8b_${reference}.json"
done
touch /tmp/R/reference.done
