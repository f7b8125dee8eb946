#!/bin/bash
# Stage `flashinfer-build`: compiles what build_flashinfer.py wrote into FOLDER, for the processor TARGETARCH.
# usage: compile_flashinfer.sh TARGET FOLDER; env: TARGETARCH, MAX_JOBS
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$0")/common.sh"
target=$1 folder=$2

# The linker passes over libraries of another processor: it finds CUDA's for the image's in torch's wheels, and the
# driver's, which no wheel has, as an empty one.
mkdir "${folder}/link"
ln -s /opt/venv/lib/python3*/site-packages/nvidia/cu13/lib/libcudart.so.13 "${folder}/link/libcudart.so"
"$(target_machine)-linux-gnu-g++" -shared -Wl,-soname,libcuda.so.1 -o "${folder}/link/libcuda.so" -x c /dev/null
commands=$(find "${folder}" -name build.ninja)
if ! ninja -f "${commands}" ${MAX_JOBS:+-j "${MAX_JOBS}"}; then
  echo "error: FlashInfer's sampling kernels were not compiled for ${target}; try: a base image with CUDA 13.0-devel" >&2
  exit 1
fi
mkdir -p "${folder}/aot/sampling"
cp "$(dirname "${commands}")/sampling.so" "${folder}/aot/sampling/"
