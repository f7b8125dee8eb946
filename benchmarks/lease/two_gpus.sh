#!/usr/bin/env bash
# What needs both GPUs, once the others have let go of them.
set -uo pipefail
# shellcheck source=benchmarks/lease/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
((gpus > 1)) || exit 0
until [[ -e /tmp/R/timing.done && -e /tmp/R/checks.done ]]; do sleep 1; done
export CUDA_VISIBLE_DEVICES=0,1
step cluster 500 python3 benchmarks/cluster_two_gpus.py --only ray one tp2 mp --folder /tmp/cluster --out /tmp/R/cluster_two_gpus.json
step clover_tp 200 python3 -m pytest -p no:cacheprovider -m gpu -v --tb=short tests/kernels/test_cloverlm_on_the_gpu.py -k two_gpus
# vLLM's command line spawns the engine, which imports everything once more; whether a fork does it, and what it saves.
step start_fork 200 python3 benchmarks/start_time.py --later 1 --sides nibble --nibble-env VLLM_WORKER_MULTIPROC_METHOD=fork --scratch /tmp \
  --logs /tmp/R/start_fork_logs --commit "${COMMIT}" --out /tmp/R/start_fork.json -- --max-num-seqs 16
