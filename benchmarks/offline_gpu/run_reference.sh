#!/usr/bin/env bash
# Each fault of a model's structure against a computed reference, and starts that compute and use one.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} OMP_NUM_THREADS=4 PYTHONPATH=${PYTHONPATH}:benchmarks/offline_gpu VLLM_USE_FLASHINFER_SAMPLER=0
export GPU_MEMORY_UTIL=0.2 NIBBLE_KV_CACHE_BYTES=$((1 << 30))
step reference_faults 330 python3 benchmarks/reference_faults.py models/nibble-demo-nvfp4 models/nibble-demo-moe-nvfp4 --out /tmp/R/reference_faults.json &
step reference_fp8 200 python3 benchmarks/reference_faults.py models/nibble-demo-nvfp4 --kv-cache-dtype fp8 --out /tmp/R/reference_faults_fp8_cache.json &
step canary 400 python3 -m pytest -p no:cacheprovider -p instant -v --slow --tb=short tests/e2e/test_reference.py --junitxml /tmp/R/reference.xml &
wait
touch /tmp/R/reference.done
