#!/usr/bin/env bash
# nibble selftest, with planted faults too; nibble tune; starts of the demo whose linear kernels are tried first, divided
# between both kernels, and replaced because of a fault.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=${LANE_GPU:-0} VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 OMP_NUM_THREADS=4
export GPU_MEMORY_UTIL=0.2 NIBBLE_KV_CACHE_BYTES=$((1 << 30)) NIBBLE_REFERENCE=off NIBBLE_CACHE_DIR=/tmp/selftest_cache
nibble=(python3 -m nibble)
# The first step reads vLLM from a cold disk.
step selftest 200 "${nibble[@]}" selftest --out /tmp/R/selftest.json
# nibble's kernels alone, which need no vLLM.
only=() plant=(--plant decode=hang --plant warpgroup=wrong --plant dequantized=nan --plant experts=crash)
plant+=(--plant w4a4=nan --plant w4a4-experts=hang --plant fp8=wrong --plant sparse=crash)
for trial in decode warpgroup dequantized experts conversions quantize w4a4 w4a4-experts fp8 sparse; do only+=(--only "${trial}"); done
step selftest_planted 100 "${nibble[@]}" selftest "${only[@]}" "${plant[@]}" --out /tmp/R/selftest_planted.json
shapes=() fp4=()
for shape in 6144x4096 4096x4096 24576x4096 4096x12288; do
  shapes+=(--shape "${shape}") fp4+=(--shape "${shape}:fp4")
done
step tune 100 "${nibble[@]}" tune "${shapes[@]}" --json
step tune_fp4 100 "${nibble[@]}" tune "${fp4[@]}" --seconds 40
step tune_planted 60 "${nibble[@]}" tune --shape 4096x4096 --plant nibble=crash
demo=models/nibble-demo-nvfp4
ask() {
  local name=$1
  shift
  step "${name}" 300 python3 benchmarks/offline_gpu/ask_real_model.py "${demo}" "/tmp/R/server_${name}.log" "$@"
  step "${name}_plan" 30 "${nibble[@]}" plan "${demo}"
}
ask tried NIBBLE_TRIALS=always
ask tried_before NIBBLE_TRIALS=always
# As if this machine had measured otherwise: two of the four shapes for vLLM, then a fault of nibble's kernel.
change() {
  python3 - "$1" <<'PYTHON'
import json, pathlib, sys
for path in pathlib.Path("/tmp/selftest_cache/trials").glob("*.json"):
    data = json.loads(path.read_text())
    for shape, times in data["shapes"].items():
        rows = shape.startswith(("1536x256", "256x768"))
        times["vllm"] = {name: time * (0.5 if rows else 2.0) for name, time in times["nibble"].items()}
    if sys.argv[1] == "fault" and "nibble" in data["outcomes"]:
        data["outcomes"]["nibble"] |= {"verdict": "wrong", "detail": "planted in the record"}
    path.write_text(json.dumps(data))
PYTHON
}
change divided
ask divided NIBBLE_TRIALS=always
change fault
ask replaced NIBBLE_TRIALS=always
CUDA_VISIBLE_DEVICES=$(seq -s , 0 $((gpus - 1))) step selftest_links 60 "${nibble[@]}" selftest --only links --out /tmp/R/selftest_links.json
cp -r /tmp/selftest_cache/trials /tmp/R/trials
touch /tmp/R/selftest.done
