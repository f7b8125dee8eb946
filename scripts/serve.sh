#!/usr/bin/env bash
# Serve a model: natively if nibble is installed in this checkout, else in the image nibble:$NIBBLE_TARGET.
# Flags are those of `nibble serve`, such as --tq (TurboQuant KV cache) and --debug (eager, verbose).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The script's model, unless the user names another in MODEL, HF_MODEL, MODEL_PATH or the first argument.
model=(ig1/Qwen3.5-27B-NVFP4)
if [[ -n "${NIBBLE_SCRIPT_MODEL:-}" ]]; then model=("$NIBBLE_SCRIPT_MODEL"); fi
unset NIBBLE_SCRIPT_MODEL
if [[ -n "${MODEL:-}${HF_MODEL:-}${MODEL_PATH:-}" || "${1:--}" != -* ]]; then model=(); fi

if [[ -x "$here/.venv/bin/nibble" ]]; then
  exec "$here/entrypoint.sh" serve "${model[@]}" "$@"
fi

target=${NIBBLE_TARGET:-gb10}
image=${NIBBLE_RUN_IMAGE:-nibble:$target}
if ! docker image inspect "$image" >/dev/null 2>&1; then
  echo "error: neither .venv nor the image $image is here; run \`make setup\` or \`./build.sh $target\`" >&2
  exit 3
fi
gpus=(--gpus all --ipc host)
if [[ $target == cpu ]]; then gpus=(); fi
# Only names: docker reads the values itself, so that no secret appears in a command line.
mapfile -t names < <(compgen -e | grep -E '^(MODEL|SERVED_MODEL_NAME|HF_|PORT$|GPU_|SERVE_GPU_UTIL|MAX_|TENSOR_|TP$|DTYPE$|QUANTIZATION$|KV_CACHE_DTYPE$|ATTENTION_BACKEND$|COMPILATION_CONFIG$|SPEC_TOKENS|MTP_TOKENS|STREAM_INTERVAL|SWAP_SPACE|LOG_LEVEL$|NIBBLE_|VLLM_|NVLLM_|NCCL_|PYTORCH_|CUDA_DEVICE_|OMP_NUM_THREADS|SAFETENSORS_|NUM_GPUS|HEAD_IP|WORKER_IP|CUTE_)' || true)
exec docker run --rm "${gpus[@]}" "${names[@]/#/--env=}" --stop-timeout 60 \
  --publish "127.0.0.1:${PORT:-8000}:${PORT:-8000}" --volume nibble-cache:/var/cache/nibble \
  --volume "${HF_HOME:-$HOME/.cache/huggingface}:/root/.cache/huggingface" "$image" serve "${model[@]}" "$@"
