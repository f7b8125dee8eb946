#!/usr/bin/env bash
# Figures, one after the other, on the first GPU.
set -uo pipefail
# shellcheck source=benchmarks/lease/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=0
VLLM_ENABLE_V1_MULTIPROCESSING=0 step decode_8b 420 python3 benchmarks/decode.py --profile --out /tmp/R/decode_8b.json \
  --ways stock nibble "nibble + NVFP4 head" "nibble + Triton attention"
step linear_more 150 python3 benchmarks/nvfp4_linear.py --shapes more --out /tmp/R/nvfp4_linear_more.json
step cloverlm 250 python3 benchmarks/cloverlm.py --only w4a16 "w4a4, batch" --out /tmp/R/cloverlm.json
step weight_loading 150 python3 benchmarks/weight_loading.py --device cuda --rounds 2 --out /tmp/R/weight_loading_cuda.json
touch /tmp/R/timing.done
