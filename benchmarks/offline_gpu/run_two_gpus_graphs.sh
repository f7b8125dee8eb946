#!/usr/bin/env bash
# Steps from CUDA graphs with each layer divided over two GPUs, after the lanes host and equal if they run.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
((gpus > 1)) || exit 0
sleep 3 # unpack.sh starts the lanes at the same time
[[ -e /tmp/R/host.log ]] && until [[ -e /tmp/R/host.done ]]; do sleep 1; done
[[ -e /tmp/R/equal.log ]] && until [[ -e /tmp/R/fuzz.done ]]; do sleep 1; done
export CUDA_VISIBLE_DEVICES=0,1 VLLM_NO_USAGE_STATS=1 NIBBLE_CANARY=warn NIBBLE_REFERENCE=off VLLM_USE_FLASHINFER_SAMPLER=0
folder=/tmp/shapes_two
step write_two 400 python3 benchmarks/host_floor.py --write "${folder}" --method eagle --shapes bf16 dense2
equal=(python3 benchmarks/step_graph_equality.py --model "${folder}/bf16" --gpus 2)
step equal_bf16_tp2 480 "${equal[@]}" --passes off on inputs --timing off on --out /tmp/R/equal_bf16_tp2.json
step floor_dense2_tp2 600 python3 benchmarks/host_floor.py --models "${folder}" --shapes dense2 --gpus 2 --streams 1 8 16 --logs /tmp/R \
  --commit "${COMMIT}" --out /tmp/R/floor_dense2_tp2.json
step equal_eagle_tp2 480 "${equal[@]}" --drafts 3 --method eagle --acceptance 0.8 --passes off on --out /tmp/R/equal_eagle_tp2.json
touch /tmp/R/two_gpus_graphs.done
