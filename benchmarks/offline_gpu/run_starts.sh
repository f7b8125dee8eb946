#!/usr/bin/env bash
# Starts of an 8B shape with and without computing a reference during the load, and that computation alone.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} VLLM_USE_FLASHINFER_SAMPLER=0
[[ -e /tmp/8b/config.json ]] || step write_8b 200 python3 benchmarks/start_time.py --write /tmp/8b
for reference in off auto; do
  step "start_8b_${reference}" 300 python3 benchmarks/start_time.py --model /tmp/8b --later 1 --sides nibble --logs "/tmp/R/starts_${reference}" \
    --nibble-env "NIBBLE_REFERENCE=${reference}" --commit "${COMMIT}" --out "/tmp/R/start_8b_${reference}.json"
done
step reference_8b 150 env OMP_NUM_THREADS=8 taskset -c 0-7 nibble reference /tmp/8b --answer-tokens 1 --out /tmp/8b-1.json --json
touch /tmp/R/starts.done
