#!/usr/bin/env bash
# Gemma 4 31B IT, NVFP4. Its recipe sets a context of 32K. GEMMA4_MODEL_PATH names a copy of it.
set -euo pipefail
NIBBLE_SCRIPT_MODEL=${GEMMA4_MODEL_PATH:-RedHatAI/gemma-4-31B-it-NVFP4} exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" "$@"
