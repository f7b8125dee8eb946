#!/bin/bash
# Stage `vllm-sdist`: the PyPI source archive, checked against its sha256, unpacked and patched, in /build/vllm.
# env: VLLM_VERSION, VLLM_SDIST_SHA256
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$0")/common.sh"

# `pip download` would build the archive's metadata, which first installs torch and CUDA. unearth only downloads.
python3 -m venv /tmp/fetch
/tmp/fetch/bin/pip install --quiet "unearth==0.19.0"
index=()
if configured="$(/tmp/fetch/bin/pip config get global.index-url 2>/dev/null)"; then
  index=(--index-url "${configured}")
fi
mkdir -p /tmp/sdist /build/vllm
/tmp/fetch/bin/unearth "vllm==${VLLM_VERSION}" --no-binary --download /tmp/sdist "${index[@]}" >/dev/null
echo "${VLLM_SDIST_SHA256}  /tmp/sdist/vllm-${VLLM_VERSION}.tar.gz" | sha256sum --check --quiet || {
  echo "error: the source archive of vllm ${VLLM_VERSION} does not have the pinned sha256 ${VLLM_SDIST_SHA256}" >&2
  exit 6
}
tar -xzf "/tmp/sdist/vllm-${VLLM_VERSION}.tar.gz" -C /build/vllm --strip-components=1
rm -r /tmp/fetch /tmp/sdist
PYTHONPATH=/patching python3 "$(dirname "$0")/apply_patches.py" /build/vllm
