# shellcheck shell=bash
# Sourced by the CPU builds, after common.sh: installs the CPU build of torch, which the lock leaves out because PyPI's is
# a CUDA build. env: TORCH_VERSION, TORCH_INDEX
index=()
if curl --silent --fail --max-time 5 --output /dev/null "${TORCH_INDEX:=https://download.pytorch.org/whl/cpu}/torch/"; then
  index=(--index-url "${TORCH_INDEX}")
fi
pip_for_the_target install --quiet --no-deps "${index[@]}" "torch==${TORCH_VERSION}+cpu"
# Read, not imported: what torch itself needs comes with the lock, after this.
grep -q '^cuda: .*= None$' /opt/venv/lib/python3*/site-packages/torch/version.py || {
  echo "error: torch ${TORCH_VERSION} from ${TORCH_INDEX} is not a CPU build" >&2
  exit 6
}
