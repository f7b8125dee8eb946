#!/bin/bash
# nibble's default model, converted, into /opt/nibble/models: a container then serves it without a network.
# env: DEMO_MODEL, 1 or 0 (leaves it out: 115 MiB)
# shellcheck source-path=SCRIPTDIR source=../steps/common.sh
source "$(dirname "$0")/../steps/common.sh"

case ${DEMO_MODEL} in
  0) exit ;;
  1) ;;
  *)
    echo "error: DEMO_MODEL is '${DEMO_MODEL}'; expected: 0 or 1; try: DEMO_MODEL=0 ./build.sh TARGET" >&2
    exit 2
    ;;
esac
# /tmp is in no layer; what a user's cache would hold is root's here.
export HOME=/tmp XDG_CACHE_HOME=/tmp/cache HF_HOME=/tmp/huggingface TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
NIBBLE_CACHE_DIR=/opt/nibble PIP_CACHE_DIR=/root/.cache/pip /opt/venv/bin/nibble pull smollm2-135m-instruct-nvfp4
rm /opt/nibble/models/.*.lock
chmod -R a+rX /opt/nibble/models
