#!/usr/bin/env bash
# CloverLM (Quartet II). Exits 5 until nibble ships the quartet2 plugin it needs.
set -euo pipefail
NIBBLE_SCRIPT_MODEL=daslab-testing/CloverLM exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" "$@"
