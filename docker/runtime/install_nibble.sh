#!/bin/bash
# Last step: nibble itself from /src (a part of the checkout) into /opt/venv, its data to /opt/nibble.
# shellcheck source-path=SCRIPTDIR source=../steps/common.sh
source "$(dirname "$0")/../steps/common.sh"

mkdir /tmp/nibble
cp -r /src/nibble /src/pyproject.toml /src/README.md /src/LICENSE /tmp/nibble/
/opt/venv/bin/pip install --quiet --no-deps --no-build-isolation --no-index --no-cache-dir /tmp/nibble
rm -r /tmp/nibble
# Bytecode is written now: at run time site-packages is read-only.
/opt/venv/bin/python -m compileall -q /opt/venv/lib/python3*/site-packages/nibble
# GPU code that the target can run must be in the compiled modules (exit 6 names the module); none for the CPU.
/opt/venv/bin/python -m nibble.engine.gpu_code /opt/venv/lib/python3*/site-packages "${NIBBLE_TARGET}"
# A recipe that this vLLM would refuse or ignore must not get into an image (exit 6). No GPU is here, and only the parser is
# asked: the CPU platform, which a CUDA build has too (vllm 0.32 platforms/__init__.py:244).
# torch makes Inductor's folder when it is imported: it would be root's, in the cache volume of 2000. /tmp is in no layer.
TORCHINDUCTOR_CACHE_DIR=/tmp/inductor VLLM_TARGET_DEVICE=cpu /opt/venv/bin/nibble recipes lint
# Every probe over the vLLM that this image will run: one that does not pass is named and stops the build (exit 6). The table
# stays beside the patches for `nibble doctor`.
/opt/venv/bin/nibble patches check
