#!/usr/bin/env bash
# Shapes with experts through both servers, default settings, then a trace by kernel: Qwen3-30B-A3B's, and Qwen3.6-35B-A3B's,
# which has not run as a whole: each of vLLM's 1024 sequences needs a block for its state. LOAD_SHAPES names some of them.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} FLASHINFER_WORKSPACE_BASE=/tmp/load_flashinfer LOAD_FIRST_PORT=9121
mkdir -p /tmp/R/experts_load /tmp/shapes "${FLASHINFER_WORKSPACE_BASE}"
for shape in ${LOAD_SHAPES:-30b-a3b 35b-a3b}; do
  if [[ ! -e /tmp/shapes/${shape}/config.json ]]; then
    step "write_${shape}" 200 python3 benchmarks/serve_load.py --shape "${shape}" --write "/tmp/begun_${shape}"
    mv -nT "/tmp/begun_${shape}" "/tmp/shapes/${shape}"
  fi
  step "load_${shape}" 400 python3 benchmarks/serve_load.py --model "/tmp/shapes/${shape}" --measure-s "${LOAD_MEASURE_S:-60}" --kv-bytes $((16 << 30)) \
    --logs /tmp/R/experts_load --commit "${COMMIT}" --out "/tmp/R/serve_load_${shape}.json"
  NIBBLE_CANARY=off NIBBLE_REFERENCE=off NIBBLE_KERNEL_ASSERTION=warn \
    step "trace_${shape}" 200 python3 -m nibble trace --start "/tmp/shapes/${shape}" --steps 16 --out "/tmp/R/trace_${shape}"
  rm -f "/tmp/R/trace_${shape}"/*.gz
done
touch /tmp/R/experts_load.done
