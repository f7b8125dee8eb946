#!/usr/bin/env bash
# nibble bench beside stock vLLM, with the default model.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export NIBBLE_CACHE_DIR=/tmp/bench_cache PORT=9311 NIBBLE_CONTROL_PORT=9312
source benchmarks/offline_gpu/default_model.sh
serve /tmp/R/server_bench.log && {
  step bench 420 python3 -m nibble bench --prompt-tokens 128 --concurrency 1,8,32 --rounds 2 --against stock \
    --stock-flags "--gpu-memory-utilization 0.3 --kv-cache-memory-bytes $((4 << 30))" --out /tmp/R/bench
  end
}
touch /tmp/R/bench.done
