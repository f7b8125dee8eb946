#!/bin/bash
# Stage `kernels`: builds and installs nibble-kernels from /kernels where that folder has a project in it.
# usage: build_kernels.sh TARGET
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$0")/common.sh"
target=$1

if [[ ! -f /kernels/pyproject.toml ]]; then
  echo "no kernels/ in this checkout: the image has vLLM's own kernels only"
  exit 0
fi
if [[ ${target} != cpu ]]; then
  TORCH_CUDA_ARCH_LIST="$(/opt/venv/bin/python "$(dirname "$0")/target_arch.py" "${target}")"
  export TORCH_CUDA_ARCH_LIST
fi
cp -r /kernels /tmp/kernels # the bind mount is read-only and setuptools writes beside its sources
CCACHE_DIR=/cache/ccache PATH="/opt/venv/bin:${PATH}" \
  /opt/venv/bin/pip install --no-deps --no-build-isolation /tmp/kernels
rm -r /tmp/kernels
