#!/bin/bash
# Runs first in every container: creates the folders of the cache volume, and uses host caches that are mounted at the
# places of older guides. Then starts the entry point, which is the same as outside a container.
set -euo pipefail
trap 'echo "[nibble] stop signal before the start: stopped; no server was running" >&2; exit 0' TERM INT HUP
umask 002 # group 0 can write even if the container later runs as another user

cache="${NIBBLE_CACHE_DIR:-/var/cache/nibble}"
seed=/root/.cache

say() { echo "[nibble] $*" >&2; }

# True only for a real mount: the image has these folders, empty. Field 5 of mountinfo is the mount point.
mounted() { awk -v path="$1" '$5 == path { found = 1 } END { exit !found }' /proc/self/mountinfo; }

# True while a variable has the image's value. A user's value wins over a mount.
untouched() { [[ ${!1:-} == "$2" ]]; }

huggingface() {
  local path=$1
  if [[ ! -r ${path} || ! -x ${path} ]]; then
    say "error: the Hugging Face cache mounted at ${path} cannot be read by user $(id -u):$(id -g);" \
      "expected a readable folder; try: docker run --user \"\$(id -u):0\" (its owner), or chmod -R o+rX on the host"
    exit 4
  fi
  if [[ -w ${path} ]]; then
    export HF_HOME="${path}"
    return
  fi
  # A read-only cache stays in use; the Hub client writes to the volume.
  export HF_HUB_CACHE="${path}/hub" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
  [[ -r ${path}/token ]] && export HF_TOKEN_PATH="${HF_TOKEN_PATH:-${path}/token}"
  say "${path} is read-only for user $(id -u):$(id -g): serving only what is complete in it"
}

# writable PATH NAME: whether the mount PATH can hold NAME's files.
writable() {
  [[ -w $1 ]] && return 0
  say "$1 cannot be written by user $(id -u):$(id -g): $2 keeps its files in ${cache} instead"
  return 1
}

if mounted "${seed}/huggingface" && untouched HF_HOME "${cache}/huggingface"; then
  huggingface "${seed}/huggingface"
fi
if mounted "${seed}/flashinfer" && untouched FLASHINFER_WORKSPACE_BASE "${cache}" && writable "${seed}/flashinfer" FlashInfer; then
  export FLASHINFER_WORKSPACE_BASE=/root # FlashInfer adds .cache/flashinfer itself
fi
if mounted "${seed}/vllm" && untouched VLLM_CACHE_ROOT "${cache}/vllm" && writable "${seed}/vllm" vLLM; then
  export VLLM_CACHE_ROOT="${seed}/vllm"
elif mounted "${seed}/vllm/torch_compile_cache" && untouched VLLM_CACHE_ROOT "${cache}/vllm" &&
  writable "${seed}/vllm/torch_compile_cache" torch.compile; then
  # Only this folder is on the host. The rest of vLLM's cache stays in the volume, with a link to the folder.
  export VLLM_CACHE_ROOT="${cache}/vllm-seed"
  mkdir -p "${VLLM_CACHE_ROOT}"
  ln -sfn "${seed}/vllm/torch_compile_cache" "${VLLM_CACHE_ROOT}/torch_compile_cache"
fi
if mounted /root/.triton && untouched TRITON_CACHE_DIR "${cache}/triton" && writable /root/.triton Triton; then
  export TRITON_CACHE_DIR=/root/.triton/cache
fi
# A new bind mount has no home yet. If the folder cannot be created, nibble's check of the cache says what to do.
mkdir -p "${HOME:-${cache}/home}" 2>/dev/null || true

exec /opt/nibble/entrypoint.sh "$@"
