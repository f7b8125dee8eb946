#!/usr/bin/env bash
# `nibble serve` beside llama.cpp on this machine's processor: on 16 cores, then on pairs of cores with AVX-512, with AVX2,
# and with AVX2 and AVX-VNNI at the same time.
set -uo pipefail
export ENVIRON=/tmp/cpu/environ
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
models=/tmp/cpu_llama
mkdir -p "${models}"
write() {
  step "write_$1" 120 python3 -c "from pathlib import Path; from benchmarks.cpu_llama_models import write_models
write_models('$1', Path('${models}/$1'))"
}
step compile_python 60 python3 -m compileall -q -j 0 -x py312_ /tmp/cpu/python/lib &
write 135m &
write 1.7b
wait
# What a native build for this processor would have.
native=avx512
grep -qw amx_int8 /proc/cpuinfo && native=amx
lscpu >/tmp/R/lscpu.log
# One logical CPU of each physical core.
mapfile -t cores < <(lscpu -p=CPU,CORE,SOCKET | awk -F, '!/^#/ && !seen[$2, $3]++ {print $1}')
all=0-$(($(nproc --all) < 16 ? $(nproc --all) - 1 : 15))

scale=${LANE_SCALE:-1} # of the limits, for a slower machine

measure() { # NAME CPUS LLAMA LIMIT_S SECONDS MODEL …
  local name=$1 cpus=$2 llama=$3 limit=$(($4 * scale)) seconds=$(($5 * scale)) model=$6 log
  shift 6
  mkdir -p "/tmp/${name}"
  ln -sfn "${models}/${model}" "/tmp/${name}/${model}"
  step "${name}" "${limit}" taskset -c "${cpus}" python3 benchmarks/cpu_llama.py --llama-python "/tmp/cpu/llama-${llama}/python" \
    --folder "/tmp/${name}" --models "${model}" --seconds "${seconds}" --out "/tmp/R/${name}.json" "$@"
  for log in "/tmp/${name}"/*.log; do cp "${log}" "/tmp/R/${name}_${log##*/}"; done
}
pairs() { # MODEL LIMIT_S SECONDS: each set of instructions on its own two cores, if there are as many
  local apart=$((${#cores[@]} >= 6)) model=$1 limit=$2 seconds=$3
  local second=$((apart * 2)) third=$((apart * 4))
  measure "cpu_llama_2_${model}" "${cores[0]},${cores[1]}" "${native}" "${limit}" "${seconds}" "${model}" --most-busy 1 &
  ((apart)) || wait
  measure "cpu_llama_2_avx2_${model}" "${cores[second]},${cores[second + 1]}" avx2 "${limit}" "${seconds}" "${model}" \
    --most-busy 1 --without-avx512 /tmp/cpu/kernels-avx2 &
  ((apart)) || wait
  grep -qw avx_vnni /proc/cpuinfo && measure "cpu_llama_2_avx_vnni_${model}" "${cores[third]},${cores[third + 1]}" avx_vnni \
    "${limit}" "${seconds}" "${model}" --most-busy 1 --without-avx512 /tmp/cpu/kernels-avx_vnni --instructions avx_vnni &
  wait
}
measure cpu_llama_16_1.7b "${all}" "${native}" 200 90 1.7b --most-busy 1
pairs 1.7b 240 150
measure cpu_llama_16_135m "${all}" "${native}" 90 40 135m --most-busy 1
pairs 135m 90 45
touch /tmp/R/cpu_llama.done
