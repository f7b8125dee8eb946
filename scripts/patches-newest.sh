#!/usr/bin/env bash
# Runs every probe on the newest release of vLLM that the package index has and prints the two tables; exit 0 whatever they say.
# Uses .venv (make setup) and 3 GB of TMPDIR meanwhile.
set -euo pipefail
PATH=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin:${PATH}

scratch=$(mktemp -d)
trap 'rm -rf "${scratch}"' EXIT

unpack() { # REQUIREMENT: the wheel that pip would take, into the tree
  python -m pip download --quiet --no-deps --only-binary=:all: --dest "${scratch}/wheel" "$1"
  python -m zipfile -e "${scratch}"/wheel/*.whl "${scratch}/tree"
  rm -r "${scratch}/wheel"
}

unpack vllm
# Beside it the FlashInfer that this release asks for.
unpack "$(sed -n 's/^Requires-Dist: \(flashinfer-python==[^ ;]*\).*/\1/p' "${scratch}"/tree/vllm-*.dist-info/METADATA)"
nibble patches status --root "${scratch}/tree"
