#!/usr/bin/env bash
# Tokens per second and time to first token of an 8B shape: `vllm serve` beside `nibble serve`, both with default settings.
# LOAD_AFTER: lanes whose end the measurement, not the starts, waits for.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
((gpus > 1)) && [[ -z ${LANE_GPU:-} ]] && taskset -p -c "0-$(($(nproc) / 2 - 1))" $$ # real_model has the other half
# FlashInfer's sampling kernels are compiled once for both servers.
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} FLASHINFER_WORKSPACE_BASE=/tmp/load_flashinfer
mkdir -p /tmp/shapes "${FLASHINFER_WORKSPACE_BASE}"
load=(python3 benchmarks/serve_load.py)
if [[ ! -e /tmp/shapes/8b/config.json && ! -e /tmp/begun_8b ]]; then
  step load_write 120 "${load[@]}" --write /tmp/load_begun
  mv -nT /tmp/load_begun /tmp/shapes/8b
fi
until [[ -e /tmp/shapes/8b/config.json ]]; do sleep 0.5; done # the lane `host` writes it
mapfile -t after < <(for lane in ${LOAD_AFTER:-}; do echo "/tmp/R/${lane}.done"; done)
step serve_load "${LOAD_LIMIT_S:-300}" "${load[@]}" --model /tmp/shapes/8b --measure-s "${LOAD_MEASURE_S:-50}" --when "${after[@]}" \
  --logs /tmp/R --commit "${COMMIT}" --out /tmp/R/serve_load_8b_h200.json
touch /tmp/R/serve_load.done
