#!/usr/bin/env bash
# SmolLM2-135M with and without steps from CUDA graphs: canary, answers, counted steps.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
mkdir -p /tmp/real_model
cat "${PARTS}"/model.tar.?? | tar -x -C /tmp/real_model
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} GPU_MEMORY_UTIL=0.2 VLLM_NO_USAGE_STATS=1
for graphs in on off; do
  step "chat_${graphs}" 300 python3 benchmarks/offline_gpu/ask_real_model.py /tmp/real_model/smollm2-135m-instruct-nvfp4 "/tmp/R/server_${graphs}.log" NIBBLE_STEP_GRAPH=${graphs}
done
export NIBBLE_CANARY=warn
step write 60 python3 benchmarks/host_floor.py --write /tmp/shapes --shapes bf16
for graphs in on off; do
  step "bf16_${graphs}" 100 python3 benchmarks/offline_gpu/ask_real_model.py /tmp/shapes/bf16 "/tmp/R/server_bf16_${graphs}.log" NIBBLE_STEP_GRAPH=${graphs}
done
touch /tmp/R/chat.done
