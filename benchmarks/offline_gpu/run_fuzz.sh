#!/usr/bin/env bash
# Ten minutes of arrivals, with and without steps from CUDA graphs.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} VLLM_NO_USAGE_STATS=1 OMP_NUM_THREADS=4 VLLM_USE_FLASHINFER_SAMPLER=0
step write_fuzz 200 python3 benchmarks/host_floor.py --write /tmp/shapes_fuzz --shapes bf16
step fuzz_ten_minutes 900 python3 benchmarks/step_graph_equality.py --model /tmp/shapes_fuzz/bf16 --requests 60 --passes off on \
  --seed 5000 --seconds 600 --out /tmp/R/fuzz_ten_minutes.json
touch /tmp/R/fuzz_ten_minutes.done
