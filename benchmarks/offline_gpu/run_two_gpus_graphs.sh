#!/usr/bin/env bash
# Steps from CUDA graphs with each layer divided over two GPUs, after the lanes host and equal.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
((gpus > 1)) || exit 0
until [[ -e /tmp/R/host.done && -e /tmp/R/fuzz.done ]]; do sleep 1; done
export CUDA_VISIBLE_DEVICES=0,1 VLLM_NO_USAGE_STATS=1 NIBBLE_CANARY=warn NIBBLE_REFERENCE=off VLLM_USE_FLASHINFER_SAMPLER=0
step equal_bf16_tp2 480 python3 benchmarks/step_graph_equality.py --model /tmp/shapes/bf16 --gpus 2 --passes off on inputs \
  --out /tmp/R/equal_bf16_tp2.json
step floor_dense2_tp2 480 python3 benchmarks/host_floor.py --models /tmp/shapes --shapes dense2 --gpus 2 --streams 1 8 16 --logs /tmp/R \
  --commit "${COMMIT}" --out /tmp/R/floor_dense2_tp2.json
touch /tmp/R/two_gpus_graphs.done
