#!/usr/bin/env bash
# What a user runs beside a server of the default model, or of the demo without the model's parts: /status, soak, eval's tool
# suite, evidence for the recipe, /metrics; then a trace, and nibble bench beside stock vLLM.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 OMP_NUM_THREADS=4
export NIBBLE_CACHE_DIR=/tmp/measure_cache PORT=9301 NIBBLE_CONTROL_PORT=9302
export GPU_MEMORY_UTIL=0.3 NIBBLE_KV_CACHE_BYTES=$((4 << 30))
model=models/nibble-demo-nvfp4
if compgen -G "${PARTS}/model.tar.*" >/dev/null; then
  mkdir -p /tmp/measure_model
  cat "${PARTS}"/model.tar.?? | tar -x -C /tmp/measure_model
  model=/tmp/measure_model/smollm2-135m-instruct-nvfp4
fi
serve() {
  python3 -m nibble serve "$@" >/tmp/R/server_measure.log 2>&1 &
  server=$!
  for ((i = 0; i < 300; i++)); do
    curl -sf "http://127.0.0.1:${NIBBLE_CONTROL_PORT}/ready" >/dev/null && return
    kill -0 "${server}" || return 1
    sleep 1
  done
}
end() {
  kill -TERM "${server}"
  wait "${server}"
  echo "server ended with $?" >>/tmp/R/steps
}
serve "${model}" && {
  step measure_status 10 curl -sf "http://127.0.0.1:${NIBBLE_CONTROL_PORT}/status"
  step measure_soak 120 python3 -m nibble soak --minutes 1 --out /tmp/R/soak.json
  step measure_tools 60 python3 -m nibble eval --tools
  step measure_verify 150 python3 -m nibble recipes verify HuggingFaceTB/SmolLM2-135M-Instruct --rounds 2 --prompt-tokens 128 \
    --out /tmp/R/verify
  step measure_metrics 10 curl -sf "http://127.0.0.1:${PORT}/metrics"
  end
}
step measure_trace 200 python3 -m nibble trace --start "${model}" --steps 16 --out /tmp/R/trace
rm -f /tmp/R/trace/*.gz
serve "${model}" && {
  step measure_bench 420 python3 -m nibble bench --prompt-tokens 128 --concurrency 1,8,32 --rounds 2 --against stock \
    --stock-flags "--gpu-memory-utilization 0.3 --kv-cache-memory-bytes $((4 << 30))" --out /tmp/R/bench
  end
}
touch /tmp/R/measure.done
