#!/usr/bin/env bash
# Two starts at the same moment; in parallel hangs, killed processes, attacks, and a computed reference on the GPU.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
# No FlashInfer sampler: each server's cache folder would compile it for a minute.
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} OMP_NUM_THREADS=4 PYTHONPATH=${PYTHONPATH}:benchmarks/offline_gpu VLLM_USE_FLASHINFER_SAMPLER=0
pytest=(python3 -m pytest -p no:cacheprovider -p instant -v --slow --tb=short)
# Other lanes use this GPU too, so a fixed KV cache replaces the measurement of free memory.
export GPU_MEMORY_UTIL=0.2 NIBBLE_KV_CACHE_BYTES=$((1 << 30))
TWO_STARTS_ROUNDS=4 step two_starts 560 env -u VLLM_USE_FLASHINFER_SAMPLER "${pytest[@]}" tests/e2e/test_two_starts.py --junitxml /tmp/R/two_starts.xml &
(
  step reference_cuda 120 nibble reference nibble-demo-nvfp4 --device cuda --out /tmp/R/reference_cuda.json
  step reference_cpu 120 nibble reference nibble-demo-nvfp4 --device cpu --out /tmp/R/reference_cpu.json
  step canary 400 "${pytest[@]}" tests/e2e/test_reference.py --junitxml /tmp/R/reference.xml
) &
# On one GPU the worker runs in the engine's process.
step hangs 420 "${pytest[@]}" tests/e2e/test_hangs.py -k "not Worker and not never_ends" --junitxml /tmp/R/hangs.xml &
step guard 400 "${pytest[@]}" tests/e2e/test_robustness.py tests/e2e/test_structured_outputs.py --junitxml /tmp/R/guard.xml &
wait
touch /tmp/R/faults.done
