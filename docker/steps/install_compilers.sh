#!/bin/bash
# Stage `compilers`: a C++ compiler for the image's processor, and ninja for FlashInfer's kernels. env: TARGETARCH
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$0")/common.sh"

packages=(ninja-build)
command -v "$(target_machine)-linux-gnu-g++" >/dev/null || packages+=("g++-$(target_machine | tr _ -)-linux-gnu")
apt_install "${packages[@]}"
