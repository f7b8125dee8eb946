#!/usr/bin/env bash
# Tests and correctness, several at a time, on the second GPU if there is one.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
# Each lane has half of the cores. Otherwise compiling kernels at a start would slow the other lane's measurements.
taskset -p -c "$(($(nproc) / 2))-$(($(nproc) - 1))" $$
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-$((gpus > 1))} OMP_NUM_THREADS=4
pytest=(python3 -m pytest -p no:cacheprovider -p instant -m gpu -v --tb=short)
export PYTHONPATH=${PYTHONPATH}:benchmarks/offline_gpu
# Other steps use this GPU too, so a fixed KV cache replaces the measurement of free memory.
export GPU_MEMORY_UTIL=0.2 NIBBLE_KV_CACHE_BYTES=$((2 << 30))
step clover_tests 700 "${pytest[@]}" tests/kernels/test_cloverlm_on_the_gpu.py -k "not two_gpus" &
(
  step quartet2_tests 60 "${pytest[@]}" tests/kernels/test_quartet2.py
  export NIBBLE_CACHE_DIR=/tmp/canary_cache # shared by all cases
  step canary_faults 550 python3 benchmarks/canary_faults.py --case experts --case larger --commit "${COMMIT}" --out /tmp/R/canary_faults.json
) &
VLLM_USE_FLASHINFER_SAMPLER=0 step robustness 240 "${pytest[@]}" -m vllm tests/e2e/test_robustness.py --junitxml /tmp/R/robustness.xml &
wait
touch /tmp/R/tests.done
