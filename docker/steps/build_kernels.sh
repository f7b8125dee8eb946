#!/bin/bash
# Stage `kernels-build`: builds the wheel of nibble-kernels from /kernels into /wheelhouse, for the processor TARGETARCH.
# /opt/venv is that processor's: this machine's Python runs its modules, except those that are compiled.
# usage: build_kernels.sh TARGET; env: TARGETARCH, MAX_JOBS
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
NIBBLE_KERNELS_TARGET_PACKAGES="$(echo /opt/venv/lib/python3*/site-packages)"
CXX="$(target_machine)-linux-gnu-g++"
export NIBBLE_KERNELS_TARGET_PACKAGES CXX
cp -r /kernels /tmp/kernels # the bind mount is read-only, and setuptools writes into the source folder
/opt/venv/bin/python -m pip wheel --no-deps --no-build-isolation --no-index --wheel-dir /wheelhouse /tmp/kernels
rm -r /tmp/kernels
# Without a compiler the build succeeds too, but the package computes in plain torch.
if ! /opt/venv/bin/python -m zipfile --list /wheelhouse/*.whl | grep -q "nibble_kernels/${library}\..*so"; then
  echo "error: nibble-kernels was not compiled for ${target}; expected ${library}.*.so; try: a base image with its compiler" >&2
  exit 6
fi
