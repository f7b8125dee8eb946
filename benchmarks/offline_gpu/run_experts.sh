#!/usr/bin/env bash
# Experts: the kernels' GPU tests, compute-sanitizer, a layer alone in every form beside Marlin, one of E4M3 experts.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} PYTHONPATH=${PYTHONPATH}:benchmarks/offline_gpu
step experts_tests 300 env OMP_NUM_THREADS=8 python3 -m pytest -p no:cacheprovider -p instant -m gpu -v --tb=short \
  tests/kernels/test_nvfp4_moe_linear.py tests/kernels/test_nvfp4_gpu_moe.py --junitxml /tmp/R/experts_tests.xml
step e4m3_tests 60 env OMP_NUM_THREADS=8 python3 -m pytest -p no:cacheprovider -p instant -m gpu -v --tb=short \
  tests/kernels/test_e4m3_gpu_moe.py --junitxml /tmp/R/e4m3_tests.xml
sanitizer=/usr/local/cuda/bin/compute-sanitizer
for tool in memcheck synccheck; do
  [[ -x ${sanitizer} ]] || break
  step "experts_${tool}" 60 "${sanitizer}" --tool "${tool}" --print-limit 20 python3 benchmarks/offline_gpu/sanitize_experts.py
done
step experts_layer 240 python3 benchmarks/nvfp4_moe.py --forms --tokens 1 2 4 8 16 32 64 --out /tmp/R/nvfp4_moe_forms_h200.json
step e4m3_layer 120 python3 benchmarks/e4m3_moe.py --tokens 1 4 16 --out /tmp/R/e4m3_moe_h200.json
touch /tmp/R/experts.done
