#!/usr/bin/env bash
# Tests and correctness, several at a time, on the second GPU where there is one; then start times, alone there.
set -uo pipefail
# shellcheck source=benchmarks/lease/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=$((gpus > 1))
pytest=(python3 -m pytest -p no:cacheprovider -m gpu -q)
step nvfp4_logits 560 python3 benchmarks/nvfp4_logits.py --device cuda --jobs 6 --out /tmp/R/nvfp4_logits.json &
step mtp_next 450 python3 benchmarks/mtp_acceptance.py --shape qwen3_next --out /tmp/R/mtp_next.json &
(
  step kernel_tests 300 "${pytest[@]}" tests/kernels --ignore=tests/kernels/test_cloverlm_on_the_gpu.py
  step clover_tests 400 "${pytest[@]}" tests/kernels/test_cloverlm_on_the_gpu.py -k "not two_gpus"
) &
# Others come and go on this GPU: no share of it, and no look at what is free.
GPU_MEMORY_UTIL=0.2 NIBBLE_KV_CACHE_BYTES=$((2 << 30)) step canary_faults 560 python3 benchmarks/canary_faults.py --case graphs --case fallback --case dense \
  --case experts --case larger --commit "${COMMIT}" --out /tmp/R/canary_faults.json &
wait
step start_time 560 python3 benchmarks/start_time.py --later 1 --scratch /tmp --logs /tmp/R/start_logs --commit "${COMMIT}" --out /tmp/R/start_time.json
touch /tmp/R/checks.done
