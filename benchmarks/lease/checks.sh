#!/usr/bin/env bash
# Tests and correctness, several at a time, on the second GPU where there is one; then start times, alone there.
set -uo pipefail
# shellcheck source=benchmarks/lease/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=$((gpus > 1)) OMP_NUM_THREADS=4
pytest=(python3 -m pytest -p no:cacheprovider -m gpu -v --tb=short)
step mtp_next 400 python3 benchmarks/mtp_acceptance.py --shape qwen3_next --out /tmp/R/mtp_next.json &
(
  step clover_tests 300 "${pytest[@]}" tests/kernels/test_cloverlm_on_the_gpu.py -k "not two_gpus"
  step kernel_tests 250 "${pytest[@]}" tests/kernels --ignore=tests/kernels/test_cloverlm_on_the_gpu.py
) &
(
  # Others come and go on this GPU: no share of it, and no look at what is free. One cache for all cases.
  export GPU_MEMORY_UTIL=0.2 NIBBLE_KV_CACHE_BYTES=$((2 << 30)) NIBBLE_CACHE_DIR=/tmp/canary_cache
  step canary_faults 350 python3 benchmarks/canary_faults.py --case fallback --case experts --case larger \
    --commit "${COMMIT}" --out /tmp/R/canary_faults.json
  step nvfp4_logits 250 python3 benchmarks/nvfp4_logits.py --device cuda --jobs 4 --models nibble-demo-moe-nvfp4 \
    --out /tmp/R/nvfp4_logits.json
) &
wait
unset OMP_NUM_THREADS
step start_time 450 python3 benchmarks/start_time.py --later 2 --scratch /tmp --logs /tmp/R/start_logs --commit "${COMMIT}" \
  --out /tmp/R/start_time.json -- --max-num-seqs 16
touch /tmp/R/checks.done
