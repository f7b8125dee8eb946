#!/usr/bin/env bash
# Gemma 4 31B IT, NVFP4. Its recipe sets a context of 32K.
set -euo pipefail
NIBBLE_SCRIPT_MODEL=RedHatAI/gemma-4-31B-it-NVFP4 exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" "$@"
