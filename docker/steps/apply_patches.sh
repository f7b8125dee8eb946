#!/bin/bash
# Applies patches/PROJECT/series to TREE as one `git apply`, all or nothing; without a series does nothing.
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
# One input, because `git apply a b` is all or nothing for each file only: a stays when b fails (seen with git 2.39).
# GIT_CEILING_DIRECTORIES: a TREE inside somebody's repository must not have its paths resolved against that one.
cd "${tree}"
cat "${names[@]/#/${folder}/}" | GIT_CEILING_DIRECTORIES="$(dirname "$(pwd -P)")" git apply - || {
  echo "error: patches/${project}/series does not apply to ${tree}; nothing was changed" >&2
  exit 6
}
printf 'patched %s: %s\n' "${project}" "${names[*]}"
