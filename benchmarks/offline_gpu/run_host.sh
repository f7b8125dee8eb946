#!/usr/bin/env bash
# Steps from CUDA graphs: equal answers, then time between tokens against vLLM.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=0 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1
mkdir -p /tmp/shapes
floor=(python3 benchmarks/host_floor.py)
equality=(python3 benchmarks/step_graph_equality.py)
[[ -e /tmp/shapes/bf16/config.json ]] || step write 120 "${floor[@]}" --write /tmp/shapes --shapes dense2 bf16
step equal_bf16 300 "${equality[@]}" --model /tmp/shapes/bf16 --passes off off on inputs --out /tmp/R/equal_bf16.json &
step equal_nvfp4 300 "${equality[@]}" --model /tmp/shapes/dense2 --passes off off on inputs --out /tmp/R/equal_nvfp4.json &
step write_more 120 "${floor[@]}" --write /tmp/shapes --shapes 0.6b moe2 &
wait
for shape in dense2 0.6b moe2; do
  step "floor_${shape}" 300 "${floor[@]}" --models /tmp/shapes --shapes "${shape}" --logs /tmp/R --commit "${COMMIT}" --out "/tmp/R/floor_${shape}.json"
done
touch /tmp/R/host.done
