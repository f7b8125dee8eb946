#!/usr/bin/env bash
# nibble's decode attention in a server beside vLLM's, in turns: the demos' answers, then step times of a two-layer and an 8B
# shape with a KV cache in BF16 and FP8. ATTENTION_RUNS names some of the runs: each takes up to 240 s. ATTENTION_COMPARE=auto
# or few compares that value with vLLM's attention.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 OMP_NUM_THREADS=8
mkdir -p /tmp/shapes
beside() {
  local name=$1 model=$2
  shift 2
  mkdir -p "/tmp/R/attention_${name}"
  step "attention_${name}" 240 python3 benchmarks/attention_server.py --model "${model}" --logs "/tmp/R/attention_${name}" \
    --compare "${ATTENTION_COMPARE:-attention}" --commit "${COMMIT}" --out "/tmp/R/attention_server_${name}.json" "$@"
}
for run in ${ATTENTION_RUNS:-demo:auto demo:fp8 dense2:auto dense2:fp8 8b:auto 8b:fp8}; do
  shape=${run%:*} kv=${run#*:}
  if [[ ${shape} == demo* ]]; then
    beside "${shape}_${kv}" "models/nibble-${shape}-nvfp4" --kv "${kv}" --memory-share 0.2 --questions models/demo_questions.jsonl
    continue
  fi
  if [[ ! -e /tmp/shapes/${shape}/config.json ]]; then
    step "attention_write_${shape}" 200 python3 benchmarks/host_floor.py --write /tmp/begun_attention --shapes "${shape}"
    mv -nT "/tmp/begun_attention/${shape}" "/tmp/shapes/${shape}"
  fi
  # shellcheck disable=SC2086 # a list
  beside "${shape}_${kv}" "/tmp/shapes/${shape}" --kv "${kv}" --rounds "${ATTENTION_ROUNDS:-2}" \
    --streams ${ATTENTION_STREAMS:-1 8 32}
done
touch /tmp/R/attention_server.done
