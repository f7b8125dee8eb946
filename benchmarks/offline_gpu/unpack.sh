#!/usr/bin/env bash
# unpack.sh PARTS_DIR SOURCES [LANE[,LANE…][@GPU]…]: unpack, check that everything loads, and start the lanes in the
# background (default: timing tests two_gpus). `one,two@1` runs two lanes one after the other on GPU 1 and on its share of
# the cores. Takes 20 s.
set -euo pipefail
parts=$1 sources=$2
shift 2
(($#)) || set -- timing tests two_gpus
mkdir -p /tmp/site /tmp/R /tmp/repo
cat "${parts}"/p?? | LD_LIBRARY_PATH=${parts}/bin "${parts}/bin/zstd" -d --long=27 -c | tar -x -C /tmp/site
tar -xzf "${parts}/nibble.tgz" -C /tmp/site
tar -C "${sources}" --exclude=./.gpu -cf - . | tar -x -C /tmp/repo
# Make the commands use this machine's Python.
for command in nibble vllm ray; do
  [[ -e /tmp/site/bin/${command} ]] && sed -i "1s|.*|#!$(command -v python3)|" "/tmp/site/bin/${command}"
done
# Through the loader, because `ip netns exec` would pass LD_LIBRARY_PATH on to its command.
printf '#!/bin/sh\nexec /lib64/ld-linux-x86-64.so.2 --library-path %s/bin %s/bin/ip "$@"\n' "${parts}" "${parts}" >/tmp/site/bin/ip
chmod +x /tmp/site/bin/ip
cat >/tmp/environ <<ENVIRON
export PYTHONPATH=/tmp/site:/tmp/repo PATH=/tmp/site/bin:${PATH} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export COMMIT=$(cat "${sources}/.gpu/commit") PARTS=${parts}
ENVIRON
# shellcheck disable=SC1091
source /tmp/environ
cd /tmp/repo
python3 - <<'PYTHON'
import importlib.metadata as m, sys, torch
import nibble_kernels
print(torch.__version__, m.version("vllm"), m.version("ray"), nibble_kernels.implementations(), torch.cuda.device_count(), "GPUs")
# Tests look for a separate build; link the installed one there.
from tests.support.kernels.kernel_build import build_folder
folder = build_folder()
folder.parent.mkdir(parents=True, exist_ok=True)
folder.symlink_to("/tmp/site/nibble_here")
PYTHON
mkdir /tmp/site/nibble_here
ln -s /tmp/site/nibble_kernels /tmp/site/nibble_kernels-*.dist-info /tmp/site/nibble_here/
ip link show lo | head -n 1
gpus=$(nvidia-smi -L | wc -l)
share=$(($(nproc) / gpus))
for word; do
  cores=0-$(($(nproc) - 1)) gpu=""
  [[ ${word} == *@* ]] && gpu=${word#*@} cores=$((gpu * share))-$((gpu * share + share - 1))
  names=${word%@*}
  # shellcheck disable=SC2016,SC2086
  LANE_GPU=${gpu} setsid taskset -c "${cores}" bash -c 'for lane; do
    bash "benchmarks/offline_gpu/run_${lane}.sh" >"/tmp/R/${lane}.log" 2>&1
  done' - ${names//,/ } &
done
