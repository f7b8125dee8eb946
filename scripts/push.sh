#!/usr/bin/env bash
# Pushes images that ./build.sh made and prints them pinned by digest: IMAGE=ghcr.io/you/nibble scripts/push.sh [TARGET...]
set -euo pipefail

for name in IMAGE_NAME IMAGE_TAG IMAGE_VERSION; do
  [[ -z ${!name:-} ]] || {
    echo "error: ${name}=${!name} is of another push script; expected: IMAGE=NAME and targets as tags; try: unset ${name}" >&2
    exit 2
  }
done
: "${IMAGE:?set IMAGE to the name in your registry, such as ghcr.io/you/nibble}"
targets=("$@")
((${#targets[@]})) || targets=(gb10 sm120 b200 hopper cpu)
docker=${DOCKER:-docker}

for target in "${targets[@]}"; do
  if ! "${docker}" image inspect "${IMAGE}:${target}" >/dev/null 2>&1; then
    "${docker}" image inspect "nibble:${target}" >/dev/null 2>&1 || {
      echo "error: no image nibble:${target} here; expected: a built image; try: ./build.sh ${target}" >&2
      exit 2
    }
    "${docker}" tag "nibble:${target}" "${IMAGE}:${target}"
  fi
  "${docker}" push --quiet "${IMAGE}:${target}" >/dev/null
  # An image has a repository digest only after a push.
  "${docker}" image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "${IMAGE}:${target}" | grep -F "${IMAGE}@"
done
