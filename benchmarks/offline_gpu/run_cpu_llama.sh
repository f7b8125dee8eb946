#!/usr/bin/env bash
# Tests of nibble's CPU products with this processor's instructions, then `nibble serve` beside llama.cpp: on 16 cores,
# there with AVX2 alone on both sides, and on pairs of cores with AVX-512, AVX2 and AVX-VNNI at the same time. What
# matters most comes first; no step begins or goes on after LANE_SECONDS (480).
set -uo pipefail
export ENVIRON=/tmp/cpu/environ
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
models=/tmp/cpu_llama
mkdir -p "${models}"
ends=$((SECONDS + ${LANE_SECONDS:-480}))
scale=${LANE_SCALE:-1} # of the limits, for a slower machine

# A step whose limit ends with the lane at the latest.
within() { # NAME LIMIT_S COMMAND …
  local name=$1 limit=$(($2 * scale)) left=$((ends - SECONDS))
  shift 2
  if ((left < 20)); then
    echo "$(date +%T) no time for ${name}" >>/tmp/R/steps
    return
  fi
  step "${name}" $((limit < left ? limit : left)) "$@"
}
write() {
  within "write_$1" 120 python3 -c "from pathlib import Path; from benchmarks.cpu_llama_models import write_models
write_models('$1', Path('${models}/$1'))"
}
tests() { # NAME SELECTED FILE …: with tests/kernels/conftest.py alone
  local name=$1 selected=$2
  shift 2
  within "tests_${name}" 120 env OMP_NUM_THREADS=4 python3 -m pytest -p no:cacheprovider --confcutdir tests/kernels --tb=short \
    -q -k "${selected}" --junitxml "/tmp/R/tests_${name}.xml" "$@"
}
lscpu >/tmp/R/lscpu.log
within compile_python 60 python3 -m compileall -q -j 0 -x py312_ /tmp/cpu/python/lib &
write 135m &
write 1.7b &
# Tests of experts, decoders and heads use the best instructions or all of them.
tests linear "amx or avx512_bf16 or processor" tests/kernels/test_nvfp4_linear.py &
tests layers "not reference" tests/kernels/test_nvfp4_moe.py tests/kernels/test_decoder.py tests/kernels/test_bf16_linear.py &
wait
# What a native build for this processor would have.
native=avx512
grep -qw amx_int8 /proc/cpuinfo && native=amx
# One logical CPU of each physical core.
mapfile -t cores < <(lscpu -p=CPU,CORE,SOCKET | awk -F, '!/^#/ && !seen[$2, $3]++ {print $1}')
all=0-$(($(nproc --all) < 16 ? $(nproc --all) - 1 : 15))

measure() { # NAME CPUS LLAMA LIMIT_S SECONDS MODEL …
  local name=$1 cpus=$2 llama=$3 limit=$4 seconds=$(($5 * scale)) model=$6 log
  shift 6
  mkdir -p "/tmp/${name}"
  ln -sfn "${models}/${model}" "/tmp/${name}/${model}"
  within "${name}" "${limit}" taskset -c "${cpus}" python3 benchmarks/cpu_llama.py --llama-python "/tmp/cpu/llama-${llama}/python" \
    --folder "/tmp/${name}" --models "${model}" --seconds "${seconds}" --out "/tmp/R/${name}.json" --most-busy 1 "$@"
  for log in "/tmp/${name}"/*.log; do cp "${log}" "/tmp/R/${name}_${log##*/}"; done
}
products() { # LEVEL: layers alone
  within "products_$1" 60 taskset -c "${all}" python3 benchmarks/cpu_nvfp4.py --skip-model --level "$1" --rounds 8 \
    --layers "small gate_up" "small down" --rows 4 16 64 256 --out "/tmp/R/products_$1.json"
}
pairs() { # MODEL LIMIT_S SECONDS: each set of instructions on its own two cores, if there are as many
  local apart=$((${#cores[@]} >= 6)) model=$1 limit=$2 seconds=$3
  local second=$((apart * 2)) third=$((apart * 4))
  measure "cpu_llama_2_${model}" "${cores[0]},${cores[1]}" "${native}" "${limit}" "${seconds}" "${model}" &
  ((apart)) || wait
  measure "cpu_llama_2_avx2_${model}" "${cores[second]},${cores[second + 1]}" avx2 "${limit}" "${seconds}" "${model}" \
    --without-avx512 /tmp/cpu/kernels-avx2 &
  ((apart)) || wait
  grep -qw avx_vnni /proc/cpuinfo && measure "cpu_llama_2_avx_vnni_${model}" "${cores[third]},${cores[third + 1]}" avx_vnni \
    "${limit}" "${seconds}" "${model}" --without-avx512 /tmp/cpu/kernels-avx_vnni --instructions avx_vnni &
  wait
}
measure cpu_llama_16_1.7b "${all}" "${native}" 150 70 1.7b
measure cpu_llama_16_avx2_1.7b "${all}" avx2 120 60 1.7b --without-avx512 /tmp/cpu/kernels-avx2
[[ ${native} == amx ]] && products amx
products avx512_bf16
pairs 1.7b 150 90
measure cpu_llama_16_135m "${all}" "${native}" 90 40 135m
pairs 135m 90 45
touch /tmp/R/cpu_llama.done
