#!/usr/bin/env bash
# What a user runs beside a server of the default model: /status, soak, eval's tool suite, evidence for the recipe, /metrics;
# then a trace.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export NIBBLE_CACHE_DIR=/tmp/measure_cache PORT=9301 NIBBLE_CONTROL_PORT=9302
source benchmarks/offline_gpu/default_model.sh
serve /tmp/R/server_measure.log && {
  step measure_status 10 curl -sf "http://127.0.0.1:${NIBBLE_CONTROL_PORT}/status"
  step measure_verify 150 python3 -m nibble recipes verify HuggingFaceTB/SmolLM2-135M-Instruct --rounds 2 --prompt-tokens 128 \
    --out /tmp/R/verify
  step measure_soak 120 python3 -m nibble soak --minutes 1 --out /tmp/R/soak.json
  step measure_tools 60 python3 -m nibble eval --tools
  step measure_metrics 10 curl -sf "http://127.0.0.1:${PORT}/metrics"
  end
}
step measure_trace 200 python3 -m nibble trace --start "${model}" --steps 16 --out /tmp/R/trace
rm -f /tmp/R/trace/*.gz
touch /tmp/R/measure.done
