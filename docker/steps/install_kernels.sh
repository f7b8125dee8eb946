#!/bin/bash
# Stage `kernels`: nibble-kernels' wheel and FlashInfer's sampling kernels into /opt/venv. env: TARGETARCH
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$0")/common.sh"

if compgen -G "/wheelhouse/*.whl" >/dev/null; then
  pip_for_the_target install --no-deps --no-index /wheelhouse/*.whl
fi
if [[ -d /aot ]]; then
  cp -r /aot "$(echo /opt/venv/lib/python3*/site-packages)/flashinfer/data/aot"
fi
