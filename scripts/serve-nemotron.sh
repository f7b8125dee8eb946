#!/usr/bin/env bash
# Nemotron 3 Super 120B A12B, NVFP4. Context and flags come from its recipe.
set -euo pipefail
NIBBLE_SCRIPT_MODEL=nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4 exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" "$@"
