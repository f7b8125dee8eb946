#!/usr/bin/env bash
# Steps from CUDA graphs with drafts of an EAGLE and of an MTP head: equal answers, a fuzzer of arrivals, times beside stock vLLM.
# The drafter's head in NVFP4 and in BF16: times, and how many drafts are accepted.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} VLLM_NO_USAGE_STATS=1 NIBBLE_CANARY=warn NIBBLE_REFERENCE=off VLLM_USE_FLASHINFER_SAMPLER=0
folder=/tmp/shapes_drafts
write=(python3 benchmarks/host_floor.py --write "${folder}")
step write_drafts_mtp 100 "${write[@]}" --shapes mtp
step write_drafts_eagle 400 "${write[@]}" --method eagle --shapes bf16 dense2
equal=(python3 benchmarks/step_graph_equality.py)
eagle=("${equal[@]}" --model "${folder}/bf16" --method eagle)
mtp=("${equal[@]}" --model "${folder}/mtp" --method mtp --linear-kernel nibble)
step equal_eagle_accepted 480 "${eagle[@]}" --drafts 3 --acceptance 0.8 --passes off off on inputs --timing off on --out /tmp/R/equal_eagle_accepted.json
step equal_mtp 480 "${mtp[@]}" --drafts 2 --passes off off on inputs --timing off on --out /tmp/R/equal_mtp.json
floor() {
  local name=$1 shape=$2
  shift 2
  step "${name}" 480 python3 benchmarks/host_floor.py --models "${folder}" --shapes "${shape}" --logs /tmp/R --commit "${COMMIT}" \
    --out "/tmp/R/${name}.json" "$@"
}
floor floor_dense2_eagle dense2 --drafts 3 --method eagle --streams 1 8 16 32
NIBBLE_DRAFT_HEAD=bf16 floor floor_dense2_eagle_bf16 dense2 --drafts 3 --method eagle --streams 1 8 16 32
floor floor_mtp mtp --drafts 2 --method mtp --streams 1 8 16
touch /tmp/R/drafts_floor.done
step draft_head_answers 200 python3 benchmarks/draft_answers.py --draft-head nvfp4 --out /tmp/R/draft_head_answers.json
step draft_head_acceptance 480 python3 benchmarks/mtp_acceptance.py --tokens 400 --drafts 3 --heads bf16 nvfp4 --noise 0.1 2 2.5 3 \
  --out /tmp/R/mtp_acceptance_draft_head.json
step equal_eagle_nvfp4_head 480 "${eagle[@]}" --drafts 3 --acceptance 0.8 --draft-head nvfp4 --passes off on --out /tmp/R/equal_eagle_nvfp4_head.json
step equal_eagle 480 "${eagle[@]}" --drafts 3 --passes off on --out /tmp/R/equal_eagle.json
step equal_eagle_one 480 "${eagle[@]}" --drafts 1 --acceptance 0.7 --passes off on --out /tmp/R/equal_eagle_one.json
step fuzz_eagle 400 "${eagle[@]}" --drafts 3 --acceptance 0.8 --requests 60 --passes off on --seed 100 --seconds 200 --out /tmp/R/fuzz_eagle.json
touch /tmp/R/drafts.done
