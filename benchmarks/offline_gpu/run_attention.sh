#!/usr/bin/env bash
# Decode attention: every form under compute-sanitizer where that is installed, the GPU's tests, and times beside
# FlashAttention 3 with several forms of the kernel and divisions of a sequence. Under 6 minutes.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} OMP_NUM_THREADS=8 PYTHONPATH=${PYTHONPATH}:benchmarks/offline_gpu:.
sanitizer=/usr/local/cuda/bin/compute-sanitizer
for form in 1 2 3; do
  step attention_form_${form} 60 python3 benchmarks/offline_gpu/sanitize_attention.py ${form}
done
if [[ -x ${sanitizer} ]]; then
  step attention_memcheck 75 "${sanitizer}" --tool memcheck --print-limit 20 \
    python3 benchmarks/offline_gpu/sanitize_attention.py 1 2 3
fi
step attention_tests 60 python3 -m pytest -p no:cacheprovider -p instant -m gpu -v --tb=short \
  tests/kernels/test_decode_attention.py
divisions="nibble=128,64 a=2048,64,2048,1,1 waits=2048,64,2048,1 b=2048,64,2048,2,1 c=2048,64,2048,3,1"
# shellcheck disable=SC2086 # a list
step attention_times 95 python3 benchmarks/decode_attention.py --out /tmp/R/decode_attention.json --seconds 90 \
  --others fa3 --forms bf16:128 fp8:128 bf16:256 fp8:256 --divisions ${divisions} d=1024,64,1024,1,1 \
  --grid 1x128 1x512 1x1024 1x2048 16x1024 32x1024 64x128 8x256 32x512 1x8192 8x8192 64x1024
# shellcheck disable=SC2086
step attention_front_times 40 python3 benchmarks/decode_attention.py --out /tmp/R/decode_attention_front.json \
  --seconds 38 --front --others fa3 --forms bf16:128 --divisions ${divisions} \
  --grid 1x128 1x512 1x1024 1x2048 16x1024 64x128
touch /tmp/R/attention.done
