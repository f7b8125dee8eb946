#!/usr/bin/env bash
# nibble's paged attention for decode steps. Exits 5 where it cannot run.
set -euo pipefail
NIBBLE_SCRIPT_MODEL=ig1/Qwen3.5-27B-NVFP4 exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" "$@" --attention-kernel nibble
