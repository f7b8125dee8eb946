#!/usr/bin/env bash
# Equal answers with and without steps from CUDA graphs, and a fuzzer of arrivals, on the second GPU if there is one.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
cores=$(nproc)
[[ -n ${LANE_GPU:-} ]] || taskset -p -c "$((cores * 3 / 8))-$((cores * 5 / 8 - 1))" $$
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-$((gpus > 1))} VLLM_NO_USAGE_STATS=1 OMP_NUM_THREADS=4 VLLM_USE_FLASHINFER_SAMPLER=0
mkdir -p /tmp/shapes /tmp/shapes_begun
for shape in dense2 bf16 hybrid2; do
  step "write_${shape}" 200 python3 benchmarks/host_floor.py --write /tmp/shapes_begun --shapes "${shape}"
  mv "/tmp/shapes_begun/${shape}" /tmp/shapes/
done
equal=(python3 benchmarks/step_graph_equality.py)
step equal_bf16 480 "${equal[@]}" --model /tmp/shapes/bf16 --passes off on inputs --timing off on --out /tmp/R/equal_bf16.json
step equal_hybrid2 480 "${equal[@]}" --model /tmp/shapes/hybrid2 --passes off off on inputs --timing off on --out /tmp/R/equal_hybrid2.json
step equal_dense2 480 "${equal[@]}" --model /tmp/shapes/dense2 --linear-kernel nibble --passes off off on inputs --out /tmp/R/equal_dense2.json
touch /tmp/R/equal.done
fuzz=("${equal[@]}" --model /tmp/shapes/bf16 --requests 60 --passes off on)
step fuzz_1 400 "${fuzz[@]}" --seed 100 --seconds 150 --out /tmp/R/fuzz_1.json
touch /tmp/R/fuzz.done
