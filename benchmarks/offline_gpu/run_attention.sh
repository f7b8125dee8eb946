#!/usr/bin/env bash
# Decode attention beside FlashAttention 3, FlashInfer and Triton, with four divisions of the keys.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} OMP_NUM_THREADS=8
step attention_times 420 python3 benchmarks/decode_attention.py --out /tmp/R/decode_attention.json --seconds 300 \
  --divisions nibble=512,64 chunk128=128,64 chunk256=256,64 chunk1024=1024,64
touch /tmp/R/attention.done
