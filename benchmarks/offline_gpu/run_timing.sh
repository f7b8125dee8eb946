#!/usr/bin/env bash
# Measurements, and other steps that need a whole GPU, one after the other on the first GPU.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
# Each lane has half of the cores. Otherwise compiling kernels at a start would slow the other lane's measurements.
taskset -p -c "0-$(($(nproc) / 2 - 1))" $$
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0}
step start_time 540 python3 benchmarks/start_time.py --later 1 --scratch /tmp --logs /tmp/R/start_logs --commit "${COMMIT}" \
  --out /tmp/R/start_time.json -- --max-num-seqs 16
step cloverlm 300 python3 benchmarks/cloverlm.py --only w4a16 "w4a16, nibble's kernel" "w4a4, token, nibble's kernel" --out /tmp/R/cloverlm.json
touch /tmp/R/timing.done
