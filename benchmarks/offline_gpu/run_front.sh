#!/usr/bin/env bash
# The GPU's tests of the kernel before attention, then its times beside vLLM's kernels. Under 250 s.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} OMP_NUM_THREADS=8 PYTHONPATH=${PYTHONPATH}:benchmarks/offline_gpu
step front_tests 60 python3 -m pytest -p no:cacheprovider -p instant -m gpu -v --tb=short \
  tests/kernels/test_attention_front.py
step front_times 190 python3 benchmarks/attention_front.py --out /tmp/R/attention_front.json --seconds 170
touch /tmp/R/front.done
