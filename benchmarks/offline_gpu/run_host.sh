#!/usr/bin/env bash
# Steps from CUDA graphs: equal answers, then time between tokens against vLLM.
# The canary is off: vLLM's products of W4A4 are not reproducible, and random weights amplify this.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=0 VLLM_NO_USAGE_STATS=1 NIBBLE_CANARY=off NIBBLE_REFERENCE=off
mkdir -p /tmp/shapes
floor=(python3 benchmarks/host_floor.py)
step write 120 "${floor[@]}" --write /tmp/shapes --shapes dense2 bf16
step write_more 200 "${floor[@]}" --write /tmp/shapes --shapes 0.6b moe2 &
step equal_bf16 300 python3 benchmarks/step_graph_equality.py --model /tmp/shapes/bf16 --passes off on inputs --out /tmp/R/equal_bf16.json
wait
for shape in dense2 0.6b moe2; do
  step "floor_${shape}" 300 "${floor[@]}" --models /tmp/shapes --shapes "${shape}" --logs /tmp/R --commit "${COMMIT}" --out "/tmp/R/floor_${shape}.json"
done
touch /tmp/R/host.done
