#!/usr/bin/env bash
# Each fault of a model's structure against a computed reference, healthy models of many families, and starts that make and use one, also
# of an 8B model's shape, where the reference is computed beside the load.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=0 OMP_NUM_THREADS=4 PYTHONPATH=${PYTHONPATH}:benchmarks/offline_gpu VLLM_USE_FLASHINFER_SAMPLER=0
export GPU_MEMORY_UTIL=0.2 NIBBLE_KV_CACHE_BYTES=$((1 << 30))
step reference_faults 330 python3 benchmarks/reference_faults.py models/nibble-demo-nvfp4 models/nibble-demo-moe-nvfp4 --out /tmp/R/reference_faults.json &
step reference_fp8 200 python3 benchmarks/reference_faults.py models/nibble-demo-nvfp4 --kv-cache-dtype fp8 --out /tmp/R/reference_faults_fp8_cache.json &
step families 400 python3 benchmarks/reference_families.py --jobs 6 --out /tmp/R/reference_families.json &
step canary 400 python3 -m pytest -p no:cacheprovider -p instant -v --slow --tb=short tests/e2e/test_reference.py --junitxml /tmp/R/reference.xml &
wait
unset GPU_MEMORY_UTIL NIBBLE_KV_CACHE_BYTES OMP_NUM_THREADS
step write_8b 200 python3 benchmarks/start_time.py --write /tmp/8b
for reference in auto off; do
  step "start_8b_${reference}" 300 python3 benchmarks/start_time.py --model /tmp/8b --later 1 --sides nibble --logs "/tmp/R/starts_${reference}" \
    --nibble-env "NIBBLE_REFERENCE=${reference}" --commit "${COMMIT}" --out "/tmp/R/start_8b_${reference}.json"
done
touch /tmp/R/reference.done
