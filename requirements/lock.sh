#!/usr/bin/env bash
# Makes requirements/{cpu,cuda,dev}.lock again: every package with the sha256 of every file PyPI has of that version,
# for Python 3.11 and newer on Linux x86-64 and aarch64. `requirements/lock.sh --upgrade` moves to the newest allowed.
set -euo pipefail
cd "$(dirname "$0")/.."

uv_version=0.13.8
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools"
"$tools/bin/pip" install --quiet "uv==$uv_version" 2>/dev/null

# Both machines are always Linux: the marker that says so on every line is noise.
both="(platform_machine == 'aarch64' and sys_platform == 'linux') or (platform_machine == 'x86_64' and sys_platform == 'linux')"

compile() { # NAME INPUT…
  local name=$1
  shift
  "$tools/bin/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
    --custom-compile-command "requirements/lock.sh" "${upgrade[@]}" "$@" -o "requirements/$name.lock"
  sed -i "s/ ; $both / /; s/ ; $both\$//" "requirements/$name.lock"
  echo "requirements/$name.lock: $(grep -c '^[a-z]' "requirements/$name.lock") packages"
}

upgrade=("$@")
compile cpu --override requirements/cpu-without.txt requirements/cpu.in requirements/common.in --extra bench pyproject.toml
compile cuda requirements/cuda.in requirements/common.in --extra bench pyproject.toml
compile dev -c requirements/cpu.lock -c requirements/cuda.lock requirements/dev.in
