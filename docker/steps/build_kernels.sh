#!/bin/bash
# Stage `kernels`: builds the wheel of nibble-kernels from /kernels into /wheelhouse and installs it.
# usage: build_kernels.sh TARGET
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$0")/common.sh"
target=$1

mkdir /wheelhouse
if [[ ! -f /kernels/pyproject.toml ]]; then
  echo "no kernels/ in this checkout: the image has vLLM's own kernels only"
  exit 0
fi
library=_cpu
if [[ ${target} != cpu ]]; then
  library=_cuda
  TORCH_CUDA_ARCH_LIST="$(/opt/venv/bin/python "$(dirname "$0")/target_arch.py" "${target}")"
  export TORCH_CUDA_ARCH_LIST
fi
cp -r /kernels /tmp/kernels # the bind mount is read-only, and setuptools writes into the source folder
CCACHE_DIR=/cache/ccache PATH="/opt/venv/bin:${PATH}" \
  /opt/venv/bin/pip wheel --no-deps --no-build-isolation --no-index --wheel-dir /wheelhouse /tmp/kernels
rm -r /tmp/kernels
/opt/venv/bin/pip install --no-deps --no-index /wheelhouse/*.whl
# Without a compiler the installation succeeds too, but the package computes in plain torch.
if ! compgen -G "/opt/venv/lib/python3*/site-packages/nibble_kernels/${library}.*so" >/dev/null; then
  echo "error: nibble-kernels was not compiled for ${target}; expected ${library}.*.so; try: a base image with its compiler" >&2
  exit 6
fi
