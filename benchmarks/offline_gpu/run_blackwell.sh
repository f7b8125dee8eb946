#!/usr/bin/env bash
# SM12x's kernels compiled for this GPU, with the FP4 instructions emulated, beside float64.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} OMP_NUM_THREADS=8 PYTHONPATH=${PYTHONPATH}:benchmarks/offline_gpu
step blackwell_cases 240 python3 benchmarks/offline_gpu/blackwell_cases.py /tmp/blackwell_cases.bin
step blackwell_build 200 nvcc -std=c++20 -O3 -fmad=false --expt-relaxed-constexpr -arch=sm_90a -I kernels/src/nibble_kernels/include \
  -I kernels/src/nibble_kernels -o /tmp/blackwell_proof benchmarks/offline_gpu/blackwell_proof.cu
step blackwell 120 /tmp/blackwell_proof /tmp/blackwell_cases.bin
step few_multiprocessors_build 120 nvcc -std=c++20 -O3 -fmad=false --expt-relaxed-constexpr -arch=sm_90a -I kernels/src/nibble_kernels/include \
  -I kernels/src/nibble_kernels -o /tmp/few_multiprocessors benchmarks/offline_gpu/few_multiprocessors.cu
step few_multiprocessors 60 /tmp/few_multiprocessors
step w4a4_tests 500 python3 -m pytest -p no:cacheprovider -p instant -m gpu -v --tb=short --durations=10 \
  tests/kernels/test_nvfp4_w4a4_linear.py tests/kernels/test_nvfp4_w4a4_moe.py tests/kernels/test_w4a4_in_vllm.py --junitxml /tmp/R/w4a4_tests.xml
touch /tmp/R/blackwell.done
