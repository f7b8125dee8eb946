#!/usr/bin/env bash
# SmolLM2-135M with nibble's linear kernel and with vLLM's: log-probs against float32, answers, an FP8 cache, sleep and wake.
# Six steps at a time. Needs the parts of pack_model.sh.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
mkdir -p /tmp/real_model
cat "${PARTS}"/model.tar.?? | tar -x -C /tmp/real_model
export REAL_MODEL=/tmp/real_model/smollm2-135m-instruct-nvfp4 REAL_MODEL_ROWS=/tmp/real_model/rows.json
export REAL_MODEL_FP8_CACHE=/tmp/real_model/fp8_cache
# With two GPUs, serve_load measures on the first one at the same time, on the other half of the cores.
((gpus > 1)) && [[ -z ${LANE_GPU:-} ]] && taskset -p -c "$(($(nproc) / 2))-$(($(nproc) - 1))" $$
# Other servers use the GPU at the same time, so a fixed KV cache replaces the measurement of free memory.
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-$((gpus > 1))} GPU_MEMORY_UTIL=0.1 NIBBLE_KV_CACHE_BYTES=$((2 << 30))
export VLLM_USE_FLASHINFER_SAMPLER=0 OMP_NUM_THREADS=2
export PYTHONPATH=${PYTHONPATH}:benchmarks/offline_gpu
# One cache for all: what a start compiles, the others find.
export TESTS_VLLM_CACHE=/tmp/real_model/vllm
declare -A tests=([4000]="4000 or cached or sampled" [fp8_scales]=scales_of [sleep]=sleep [recorded]=recorded [fp8]=with_an_fp8 [ngram]=ngram)
# A kernel at a time: on a machine with few cores, the starts of twelve servers would outlast the limit.
for kernel in nibble vllm; do
  for part in 4000 fp8_scales sleep recorded fp8 ngram; do
    name=real_model_${kernel}_${part}
    NIBBLE_LINEAR_KERNEL=${kernel} step "${name}" 400 python3 -m pytest -p no:cacheprovider -p instant --slow -v --tb=short \
      tests/e2e/test_real_model.py -k "${tests[${part}]}" --junitxml "/tmp/R/${name}.xml" &
  done
  wait
done
touch /tmp/R/real_model.done
