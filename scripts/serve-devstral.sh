#!/usr/bin/env bash
# Devstral 2 Large (123B), a community NVFP4 checkpoint. The recipe is for the official FP8 one.
set -euo pipefail
NIBBLE_SCRIPT_MODEL=BrainForge/Devstral-2-123B-Instruct-2512-NVFP4 exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" "$@"
