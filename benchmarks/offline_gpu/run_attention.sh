#!/usr/bin/env bash
# Decode attention: by blocks and by clusters under compute-sanitizer where that is installed, the GPU's tests, and
# times beside FlashAttention 3. Under 6 minutes.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} OMP_NUM_THREADS=8 PYTHONPATH=${PYTHONPATH}:benchmarks/offline_gpu:.
sanitizer=/usr/local/cuda/bin/compute-sanitizer
step attention_small 60 python3 benchmarks/offline_gpu/sanitize_attention.py
step attention_times 90 python3 benchmarks/decode_attention.py --out /tmp/R/decode_attention_few.json --seconds 86 \
  --others fa3 --forms bf16:128 fp8:128 \
  --grid 1x128 1x1024 1x2048 1x4096 1x8192 1x16384 1x32768 1x65536 1x131072 2x1024 2x8192 4x256 4x1024 4x8192 4x32768 8x1024
step attention_tests 75 python3 -m pytest -p no:cacheprovider -p instant -m gpu -v --tb=short \
  tests/kernels/test_decode_attention.py
step attention_front_times 30 python3 benchmarks/decode_attention.py --out /tmp/R/decode_attention_few_front.json \
  --seconds 28 --front --others fa3 --forms bf16:128 --grid 1x128 1x1024 1x8192 4x256 4x1024 4x8192
if [[ -x ${sanitizer} ]]; then
  step attention_memcheck 60 "${sanitizer}" --tool memcheck --print-limit 20 \
    python3 benchmarks/offline_gpu/sanitize_attention.py
fi
touch /tmp/R/attention.done
