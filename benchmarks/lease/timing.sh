#!/usr/bin/env bash
# Figures, one after the other, on the first GPU.
set -uo pipefail
# shellcheck source=benchmarks/lease/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=0
step linear 240 python3 benchmarks/nvfp4_linear.py --shapes all --out /tmp/R/nvfp4_linear.json
export VLLM_ENABLE_V1_MULTIPROCESSING=0
step decode_8b 480 python3 benchmarks/decode.py --profile --out /tmp/R/decode_8b.json \
  --ways stock nibble "nibble + NVFP4 head" "nibble + Triton attention" "nibble + 8 splits"
step decode_30b 360 python3 benchmarks/decode.py --shape 30b-a3b --out /tmp/R/decode_30b.json \
  --ways stock "nibble + experts" "nibble + experts + NVFP4 head"
unset VLLM_ENABLE_V1_MULTIPROCESSING
step cloverlm 400 python3 benchmarks/cloverlm.py --out /tmp/R/cloverlm.json
touch /tmp/R/timing.done
step mtp_step 200 python3 benchmarks/mtp_step.py --drafts 0 3 --out /tmp/R/mtp_step.json
step weight_loading 150 python3 benchmarks/weight_loading.py --device cuda --out /tmp/R/weight_loading_cuda.json
