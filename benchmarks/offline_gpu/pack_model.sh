#!/usr/bin/env bash
# pack_model.sh PARTS_DIR: pack the default model for the lanes real_model and chat; the scales of an FP8 cache, in a folder
# that shares its weights; and the held-out text as token ids, so that results are for the same text as the CPU's.
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
file=$(cd "${repo}" && .venv/bin/python -c 'from tests.support.models.real_model import gguf_file; print(gguf_file())')
"${nibble}" convert "${file}" "${scratch}/fp8_cache" --to nvfp4 --four-over-six --kv-cache fp8
"${repo}/.venv/bin/python" - "${scratch}/fp8_cache" "${model}" <<'PYTHON'
import sys
from pathlib import Path
from safetensors.torch import load_file, save_file
folder, model = map(Path, sys.argv[1:])
both, shared = load_file(folder / "model.safetensors"), load_file(model / "model.safetensors")
assert all(both[name].equal(tensor) for name, tensor in shared.items() if tensor.element_size() > 1)
(folder / "model.safetensors").unlink()
(folder / "model.safetensors").symlink_to(f"../{model.name}/model.safetensors")
scales = {name: tensor for name, tensor in both.items() if name not in shared}
save_file(scales, folder / "cache_scales.safetensors", metadata={"format": "pt"})
PYTHON
tar -C "${scratch}" -c . | split -b 38M - "${parts}/model.tar."
ls -l "${parts}"/model.tar.*
