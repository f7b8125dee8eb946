#!/usr/bin/env bash
# Steps that need both GPUs, after the other lanes have ended.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
((gpus > 1)) || exit 0
until [[ -e /tmp/R/timing.done && -e /tmp/R/tests.done ]]; do sleep 1; done
export CUDA_VISIBLE_DEVICES=0,1
export PYTHONPATH=${PYTHONPATH}:benchmarks/offline_gpu
step cluster 280 python3 benchmarks/cluster_two_gpus.py --only ray one --folder /tmp/cluster --out /tmp/R/cluster_two_gpus.json
# nibble's GEMM on shards: the kernel assertion checks that it ran, and the text must equal that of one GPU.
NIBBLE_LINEAR_KERNEL=nibble step cluster_nibble 150 python3 benchmarks/cluster_two_gpus.py --only tp2 --folder /tmp/cluster_nibble \
  --out /tmp/R/cluster_nibble.json
step clover_tp 420 python3 -m pytest -p no:cacheprovider -p instant -m gpu -v --tb=short tests/kernels/test_cloverlm_on_the_gpu.py -k two_gpus
