#!/usr/bin/env bash
# An 8B shape through both servers as chats sample by default: temperature, top-k and top-p without seeds. With FlashInfer's
# sampler, which vLLM takes, and with vLLM's own one.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} FLASHINFER_WORKSPACE_BASE=/tmp/sampled_flashinfer LOAD_FIRST_PORT=9131
mkdir -p /tmp/shapes /tmp/R/sampled "${FLASHINFER_WORKSPACE_BASE}"
if [[ ! -e /tmp/shapes/8b/config.json ]]; then
  step sampled_write 120 python3 benchmarks/serve_load.py --write /tmp/sampled_begun
  mv -nT /tmp/sampled_begun /tmp/shapes/8b
fi
for flashinfer in 1 0; do
  VLLM_USE_FLASHINFER_SAMPLER=${flashinfer} step "sampled_${flashinfer}" 300 python3 benchmarks/serve_load.py --model /tmp/shapes/8b \
    --sampling '{"temperature": 0.7, "top_p": 0.9, "top_k": 20}' --streams 1 8 32 --prompts --measure-s "${LOAD_MEASURE_S:-30}" \
    --logs /tmp/R/sampled --commit "${COMMIT}" --out "/tmp/R/sampled_${flashinfer}.json"
done
touch /tmp/R/sampled_load.done
