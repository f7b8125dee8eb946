#!/usr/bin/env bash
# pack_model.sh PARTS_DIR: pack the default model for the lanes real_model and chat, and the held-out text as token ids, so
# that results are for the same text as the CPU's.
set -euo pipefail
parts=$(realpath "$1")
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
nibble=${repo}/.venv/bin/nibble
scratch=$(mktemp -d)
trap 'rm -rf "${scratch}"' EXIT

"${nibble}" pull smollm2-135m-instruct-nvfp4
model=${NIBBLE_CACHE_DIR:-${HOME}/.cache/nibble}/models/smollm2-135m-instruct-nvfp4
cp -r "${model}" "${scratch}/"
PYTHONPATH=${repo}/benchmarks "${repo}/.venv/bin/python" - "${model}" >"${scratch}/rows.json" <<'PYTHON'
import json, sys
from real_model_text import held_out
from transformers import AutoTokenizer
print(json.dumps(held_out(AutoTokenizer.from_pretrained(sys.argv[1]))))
PYTHON
tar -C "${scratch}" -c . | split -b 60M - "${parts}/model.tar."
ls -l "${parts}"/model.tar.*
