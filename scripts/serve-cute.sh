#!/usr/bin/env bash
# The CuTe paged attention path. Exits 5 until nibble ships that kernel.
set -euo pipefail
NIBBLE_SCRIPT_MODEL=ig1/Qwen3.5-27B-NVFP4 exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" "$@" --attention-backend CUTE_PAGED
