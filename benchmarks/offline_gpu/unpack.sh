#!/usr/bin/env bash
# unpack.sh PARTS_DIR SOURCES [LANE[,LANE…][@GPU]…]: unpack, check that everything loads, and start the lanes in the
# background (default: timing tests two_gpus). `one,two@1` runs two lanes one after the other on GPU 1 and on its share of
# the cores. Lanes are run_LANE.sh in this folder or in SOURCES/.gpu. PARTS_DIR has the parts of the GPU runtime, of the
# CPU runtime, or both. Takes 20 s for each.
set -euo pipefail
parts=$1 sources=$2
if ! compgen -G "${parts}/[pc]00" >/dev/null; then
  echo "unpack.sh: no parts in ${parts}; expected p00, p01, … or c00, c01, …: copy them there first" >&2
  exit 2
fi
shift 2
(($#)) || set -- timing tests two_gpus
mkdir -p /tmp/R /tmp/repo
tar -C "${sources}" --exclude=./.gpu -cf - . | tar -x -C /tmp/repo
commit=$(cat "${sources}/.gpu/commit")
if compgen -G "${sources}/.gpu/run_*.sh" >/dev/null; then cp "${sources}"/.gpu/run_*.sh /tmp/repo/benchmarks/offline_gpu/; fi

unpack() { # LETTER FOLDER
  mkdir -p "$2"
  cat "${parts}/$1"?? | LD_LIBRARY_PATH=${parts}/bin "${parts}/bin/zstd" -d --long=27 -c | tar -x -C "$2"
}

unpack_gpu_runtime() {
  unpack p /tmp/site
  tar -xzf "${parts}/nibble.tgz" -C /tmp/site
  # Make the commands use this machine's Python.
  for command in nibble vllm ray; do
    [[ -e /tmp/site/bin/${command} ]] && sed -i "1s|.*|#!$(command -v python3)|" "/tmp/site/bin/${command}"
  done
  # Through the loader, because `ip netns exec` would pass LD_LIBRARY_PATH on to its command.
  printf '#!/bin/sh\nexec /lib64/ld-linux-x86-64.so.2 --library-path %s/bin %s/bin/ip "$@"\n' "${parts}" "${parts}" >/tmp/site/bin/ip
  chmod +x /tmp/site/bin/ip
  cat >/tmp/environ <<ENVIRON
export PYTHONPATH=/tmp/site:/tmp/repo PATH=/tmp/site/bin:${PATH} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export COMMIT=${commit} PARTS=${parts}
ENVIRON
  (
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
  )
}

# vLLM's CPU runtime with its own Python, for the lane cpu_llama.
unpack_cpu_runtime() {
  unpack c /tmp/cpu
  mkdir -p /tmp/cpu/bin
  printf '#!/bin/sh\nexec /tmp/cpu/python/bin/python3 -m nibble "$@"\n' >/tmp/cpu/bin/nibble
  for llama in /tmp/cpu/llama-*; do
    # shellcheck disable=SC2016 # the script's own parameters
    printf '#!/bin/sh\nPYTHONPATH=%s exec /tmp/cpu/python/bin/python3 "$@"\n' "${llama}" >"${llama}/python"
  done
  chmod +x /tmp/cpu/bin/nibble /tmp/cpu/llama-*/python
  cat >/tmp/cpu/environ <<ENVIRON
unset OMP_NUM_THREADS
export PYTHONPATH=/tmp/repo PATH=/tmp/cpu/bin:/tmp/cpu/python/bin:${PATH}
export LD_LIBRARY_PATH=/tmp/cpu/lib${LD_LIBRARY_PATH:+:${LD_LIBRARY_PATH}}
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 CUDA_VISIBLE_DEVICES= NIBBLE_TARGET=cpu COMMIT=${commit} PARTS=${parts}
ENVIRON
  (
    # shellcheck disable=SC1091
    source /tmp/cpu/environ
    cd /tmp/repo
    python3 - <<'PYTHON'
import importlib.metadata as m, torch
import nibble_kernels
from nibble.machine.cpus import compute_cores
from nibble_kernels.nvfp4_linear import cpu_levels
print(torch.__version__, m.version("vllm"), nibble_kernels.implementations(), cpu_levels(), compute_cores())
from pathlib import Path
# Tests look for a separate build; link the installed one there.
from tests.support.kernels.kernel_build import build_folder
folder, here = build_folder(), Path(nibble_kernels.__file__).parents[0]
folder.mkdir(parents=True)
for path in (here, *here.parent.glob("nibble_kernels-*.dist-info")):
    (folder / path.name).symlink_to(path)
PYTHON
    for llama in amx avx512 avx_vnni avx2; do ldd /tmp/cpu/llama-${llama}/llama_cpp/lib/libggml-cpu.so | grep "not found" || true; done
  )
}

# What an earlier machine compiled (progress.sh): vLLM starts in less time with it.
if [[ -e ${parts}/caches.tgz ]]; then tar -xzf "${parts}/caches.tgz" -C "${HOME}"; fi
if compgen -G "${parts}/p??" >/dev/null; then unpack_gpu_runtime; fi
if compgen -G "${parts}/c??" >/dev/null; then unpack_cpu_runtime; fi
gpus=$( (nvidia-smi -L 2>/dev/null || echo none) | wc -l)
cd /tmp/repo
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
