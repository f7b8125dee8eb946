#!/usr/bin/env bash
# memcheck and synccheck of experts, linear layers and decode attention in every form.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} OMP_NUM_THREADS=4 PATH=${PATH}:/usr/local/cuda/bin
for tool in memcheck synccheck; do
  for what in experts attention; do
    step "${tool}_${what}" 150 compute-sanitizer --tool "${tool}" python3 "benchmarks/offline_gpu/sanitize_${what}.py"
  done
done
touch /tmp/R/sanitize.done
