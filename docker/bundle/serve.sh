#!/usr/bin/env bash
# Serve this folder's model on 127.0.0.1:$PORT (8000). Arguments are further options of `docker run`, such as --env NAME=VALUE.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=docker/bundle/engine.sh
source ./engine.sh

port=${PORT:-8000}
options=(--publish "127.0.0.1:${port}:8000" --volume nibble-cache:/var/cache/nibble --env HF_HUB_OFFLINE=1)
if [[ ${TARGET} != cpu ]]; then options+=(--gpus all --ipc host); fi
if [[ -d huggingface ]]; then options+=(--volume "${PWD}/huggingface:/root/.cache/huggingface:ro"); fi
if [[ -d models ]]; then options+=(--volume "${PWD}/models:/models:ro"); fi
model=()
if [[ -n ${MODEL} ]]; then model=("${MODEL}"); fi
exec "${engine}" run --rm --name nibble --stop-timeout 60 "${options[@]}" "$@" "${IMAGE}" serve "${model[@]}"
