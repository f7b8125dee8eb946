#!/usr/bin/env bash
# The kernels' GPU tests (codes under every scale, sums against float64, divisions, replays, batches), and decode
# attention beside FlashAttention 3, FlashInfer and Triton.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} OMP_NUM_THREADS=8 PYTHONPATH=${PYTHONPATH}:benchmarks/offline_gpu
pytest=(python3 -m pytest -p no:cacheprovider -p instant -m gpu -v --tb=short --durations=10)
step kernel_tests 150 "${pytest[@]}" tests/kernels/test_nvfp4_warpgroup_linear.py tests/kernels/test_nvfp4_gpu_linear.py \
  tests/kernels/test_e4m3_gpu_linear.py tests/kernels/test_nvfp4_gpu_moe.py tests/kernels/test_nvfp4_moe_linear.py \
  tests/kernels/test_decode_attention.py \
  --junitxml /tmp/R/kernel_tests.xml
touch /tmp/R/kernels.done
