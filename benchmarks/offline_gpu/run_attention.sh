#!/usr/bin/env bash
# The GPU's tests of decode attention, then its times beside FlashAttention 3 with several forms of the kernel and
# divisions of a sequence. Under 250 s.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} OMP_NUM_THREADS=8 PYTHONPATH=${PYTHONPATH}:benchmarks/offline_gpu
step attention_tests 45 python3 -m pytest -p no:cacheprovider -p instant -m gpu -v --tb=short \
  tests/kernels/test_decode_attention.py
step attention_times 150 python3 benchmarks/decode_attention.py --out /tmp/R/decode_attention.json --seconds 140 \
  --others fa3 --forms fp8:128 fp8:256 bf16:128 bf16:256 \
  --grid 1x128 1x1024 1x8192 8x8192 8x32768 32x256 1x32768 32x1024 64x128 32x16384 8x1024 1x2048 64x8192 16x8192 \
  --divisions nibble=128,64 a=256,33,512,1 b=256,33,512,2 c=256,33,512,3 d=256,33,512,4 e=512,33,512,1 \
  f=256,66,512,2 g=128,66,256,2 h=512,66,1024,1 read=256,33,512,5 read2=256,33,512,6
touch /tmp/R/attention.done
