#!/usr/bin/env bash
# Steps from CUDA graphs: equal answers, the host's time, and time between tokens against vLLM.
set -uo pipefail
# shellcheck source=benchmarks/offline_gpu/steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
export CUDA_VISIBLE_DEVICES=0 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1
mkdir -p /tmp/shapes
floor="python3 benchmarks/host_floor.py"
equality="python3 benchmarks/step_graph_equality.py --model /tmp/shapes/dense2"
[[ -e /tmp/shapes/dense2/config.json ]] || step write 120 ${floor} --write /tmp/shapes --shapes dense2
step equal_on 200 ${equality} --one on --no-timing --out /tmp/R/equal_on.json &
step equal_off 200 ${equality} --one off --no-timing --out /tmp/R/equal_off.json &
wait
python3 - >/tmp/R/equal.log 2>&1 <<'PYTHON'
import json
on, off = (json.load(open(f"/tmp/R/equal_{m}.json")) for m in ("on", "off"))
bad = [n for n in off["answers"] if off["answers"][n] != on["answers"].get(n)]
print(len(off["answers"]), "answers", len(bad), "different", sorted({off["kinds"][n.partition("#")[0]] for n in bad}))
for n in bad[:8]:
    a, b = off["answers"][n], on["answers"].get(n)
    first = next((i for i, (x, y) in enumerate(zip(a[0], b[0])) if x != y), None)
    print(n, off["kinds"][n.partition("#")[0]], "first token", first, len(a[0]), len(b[0]), a[2:4], b[2:4])
PYTHON
step time_on 150 ${equality} --one on --requests 0 --profile --out /tmp/R/time_on.json
step time_off 150 ${equality} --one off --requests 0 --profile --out /tmp/R/time_off.json
touch /tmp/R/host.done
