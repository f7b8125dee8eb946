#!/usr/bin/env bash
# Healthy models of many families against computed references, and drafts that share their target's embedding or head.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} OMP_NUM_THREADS=2 VLLM_USE_FLASHINFER_SAMPLER=0 GPU_MEMORY_UTIL=0.06
step families 420 python3 benchmarks/reference_families.py --jobs 9 --out /tmp/R/reference_families.json &
step drafts 200 python3 benchmarks/draft_answers.py --out /tmp/R/draft_answers.json &
step mtp 200 python3 benchmarks/mtp_acceptance.py --eager --out /tmp/R/mtp_acceptance.json &
wait
touch /tmp/R/models.done
