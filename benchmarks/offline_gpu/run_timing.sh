#!/usr/bin/env bash
# Figures and what needs a GPU for itself, one after the other, on the first GPU.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
# Half of the cores each: kernels that are compiled at a start would otherwise stretch the figures of the other lane.
taskset -p -c "0-$(($(nproc) / 2 - 1))" $$
export CUDA_VISIBLE_DEVICES=0
step start_time 540 python3 benchmarks/start_time.py --later 1 --scratch /tmp --logs /tmp/R/start_logs --commit "${COMMIT}" \
  --out /tmp/R/start_time.json -- --max-num-seqs 16
step cloverlm 300 python3 benchmarks/cloverlm.py --only w4a16 "w4a16, nibble's kernel" "w4a4, token, nibble's kernel" --out /tmp/R/cloverlm.json
touch /tmp/R/timing.done
