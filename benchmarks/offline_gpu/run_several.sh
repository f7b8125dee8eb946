#!/usr/bin/env bash
# Two models by turns on one GPU: on demand, with one that sleeps.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export NIBBLE_CACHE_DIR=/tmp/several_cache
source benchmarks/offline_gpu/default_model.sh
export NIBBLE_REFERENCE=off
step several 400 python3 benchmarks/offline_gpu/several_models.py "${model}" models/nibble-demo-moe-nvfp4 /tmp/R/server_several.log
touch /tmp/R/several.done
