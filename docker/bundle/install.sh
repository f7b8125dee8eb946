#!/usr/bin/env bash
# Check this folder's files and load its image. Needs Docker or Podman, and no network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=docker/bundle/engine.sh
source ./engine.sh

sha256sum --quiet --strict --check SHA256SUMS || {
  echo "error: a file of this folder is missing or was changed; copy the folder again" >&2
  exit 6
}
"${engine}" load --quiet --input image.tar
"${engine}" image inspect "${IMAGE}" >/dev/null
echo "${IMAGE} is loaded; ./serve.sh serves ${MODEL:-the default model}" >&2
