#!/usr/bin/env bash
# CloverLM (NVFP4 by Quartet II); its vocabulary file: docs/cloverlm.md.
set -euo pipefail
NIBBLE_SCRIPT_MODEL=daslab-testing/CloverLM exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" "$@"
