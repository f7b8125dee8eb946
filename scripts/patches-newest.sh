#!/usr/bin/env bash
# Runs every probe on the newest vLLM release of the package index and prints both tables; always exits with 0.
# Needs .venv (make setup) and 3 GB in TMPDIR.
set -euo pipefail
PATH=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin:${PATH}

scratch=$(mktemp -d)
trap 'rm -rf "${scratch}"' EXIT

unpack() { # REQUIREMENT: unpacks the wheel that pip would install into the tree
  python -m pip download --quiet --no-deps --only-binary=:all: --dest "${scratch}/wheel" "$1"
  python -m zipfile -e "${scratch}"/wheel/*.whl "${scratch}/tree"
  rm -r "${scratch}/wheel"
}

unpack vllm
# Also the FlashInfer that this release requires.
unpack "$(sed -n 's/^Requires-Dist: \(flashinfer-python==[^ ;]*\).*/\1/p' "${scratch}"/tree/vllm-*.dist-info/METADATA)"
nibble patches status --root "${scratch}/tree"
