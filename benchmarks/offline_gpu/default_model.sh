# Sourced by lanes. Puts the default model into nibble's cache, and starts and ends a server of ${model}: the demo without the
# model's parts.
# shellcheck shell=bash
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 OMP_NUM_THREADS=4
export GPU_MEMORY_UTIL=0.3 NIBBLE_KV_CACHE_BYTES=$((4 << 30))
model=models/nibble-demo-nvfp4
if compgen -G "${PARTS}/model.tar.*" >/dev/null; then
  mkdir -p "${NIBBLE_CACHE_DIR}/models"
  cat "${PARTS}"/model.tar.?? | tar -x -C "${NIBBLE_CACHE_DIR}/models"
  model=smollm2-135m-instruct-nvfp4
fi
serve() {
  python3 -m nibble serve "${model}" >"$1" 2>&1 &
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
