#!/usr/bin/env bash
# Log-probs of SmolLM2-135M against float32 arithmetic, with nibble's kernel and with vLLM's.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
mkdir -p /tmp/real_model
cat "${PARTS}"/model.tar.?? | tar -x -C /tmp/real_model
export REAL_MODEL=/tmp/real_model/smollm2-135m-instruct-nvfp4 CUDA_VISIBLE_DEVICES=0
export GPU_MEMORY_UTIL=0.2 VLLM_USE_FLASHINFER_SAMPLER=0
for kernel in nibble vllm; do
  NIBBLE_LINEAR_KERNEL=${kernel} step "real_model_${kernel}" 280 python3 -m pytest -p no:cacheprovider --slow \
    tests/e2e/test_real_model.py -k "4000 or cached or sampled" --junitxml "/tmp/R/real_model_${kernel}.xml"
done
touch /tmp/R/real_model.done
