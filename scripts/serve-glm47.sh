#!/usr/bin/env bash
# GLM-4.7 NVFP4 on four RTX PRO 6000, with the pinned revision of its recipe.
set -euo pipefail
NIBBLE_SCRIPT_MODEL=Salyut1/GLM-4.7-NVFP4 exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" "$@"
