#!/usr/bin/env bash
# The GPU's tests of decode attention, then its times beside FlashAttention 3, FlashInfer and Triton with several
# divisions of a sequence. Under 250 s.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} OMP_NUM_THREADS=8 PYTHONPATH=${PYTHONPATH}:benchmarks/offline_gpu
step attention_tests 45 python3 -m pytest -p no:cacheprovider -p instant -m gpu -v --tb=short \
  tests/kernels/test_decode_attention.py
step attention_times 205 python3 benchmarks/decode_attention.py --out /tmp/R/decode_attention.json --seconds 190 \
  --divisions nibble=128,64 c256=256,64 c256s128=256,128 c128s128=128,128 c128s32=128,32 c64=64,64 \
  --forms fp8:128 fp8:256 bf16:128 bf16:256 \
  --grid 1x128 1x1024 1x8192 8x8192 64x8192 1x32768 8x1024 64x128 8x32768 32x1024 32x16384 1x2048 8x128 64x1024
touch /tmp/R/attention.done
