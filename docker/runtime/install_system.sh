#!/bin/bash
# Stage `runtime`, before the venv comes in: system packages, the user 2000:0, the cache volume and /root's mount points.
# env: RUNTIME_PACKAGES, more Debian packages
# shellcheck source-path=SCRIPTDIR source=../steps/common.sh
source "$(dirname "$0")/../steps/common.sh"

read -ra packages <<<"${RUNTIME_PACKAGES:-}"
# g++ and Python's headers are for torch.compile and Triton, which build C++ at the first start; numa and gomp for torch.
apt_install tini python3 python3-dev g++ libnuma1 libgomp1 ca-certificates "${packages[@]}"

useradd --uid 2000 --gid 0 --no-create-home --home-dir /var/cache/nibble/home --shell /bin/bash nibble
# Group 0 may write, so that any `--user UID:0` works (the OpenShift convention); setgid keeps new folders that way.
install -d -o 2000 -g 0 -m 2775 /var/cache/nibble /var/cache/nibble/home
# Older guides mount host caches under /root/.cache: every user must be able to enter it, only root to list it.
install -d -m 0711 /root /root/.cache /root/.cache/vllm
install -d -m 0755 /root/.cache/huggingface /root/.cache/flashinfer /root/.cache/vllm/torch_compile_cache /root/.triton
