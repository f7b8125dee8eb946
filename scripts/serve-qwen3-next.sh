#!/usr/bin/env bash
# Qwen3-Next 80B A3B Instruct, NVFP4. Its recipe sets multi-token prediction.
set -euo pipefail
NIBBLE_SCRIPT_MODEL=nvidia/Qwen3-Next-80B-A3B-Instruct-NVFP4 exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" "$@"
