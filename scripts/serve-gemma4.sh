#!/usr/bin/env bash
# Gemma 4 31B IT, NVFP4, 32K context as its recipe says.
set -euo pipefail
NIBBLE_SCRIPT_MODEL=RedHatAI/gemma-4-31B-it-NVFP4 exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" "$@"
