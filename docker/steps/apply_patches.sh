#!/bin/bash
# Applies patches/PROJECT/series to TREE in one `git apply`, which is all or nothing; without a series does nothing.
# usage: apply_patches.sh PROJECT TREE   (PATCHES_DIR, default /patches, holds PROJECT/series)
set -euo pipefail
project=$1 tree=$2
folder="${PATCHES_DIR:-/patches}/${project}"

if [[ ! -f "${folder}/series" ]]; then
  echo "no patches for ${project}"
  exit 0
fi
mapfile -t names < <(sed -e 's/#.*//' -e 's/[[:space:]]*$//' "${folder}/series" | grep -v '^$')
if ((${#names[@]} == 0)); then
  echo "no patches for ${project}: ${folder}/series is empty"
  exit 0
fi
# GIT_CEILING_DIRECTORIES: a TREE inside somebody's repository must not have its paths resolved against that one.
cd "${tree}"
GIT_CEILING_DIRECTORIES="$(dirname "$(pwd -P)")" git apply -C3 "${names[@]/#/${folder}/}" || {
  echo "error: patches/${project}/series does not apply to ${tree}; nothing was changed" >&2
  exit 6
}
printf 'patched %s: %s\n' "${project}" "${names[*]}"
