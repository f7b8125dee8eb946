#!/usr/bin/env bash
# Entry point, natively and in the image: serve (default) and every other verb of nibble; anything else is executed as given.
set -euo pipefail
trap 'echo "[nibble] stop signal before the start: stopped; no server was running" >&2; exit 0' TERM INT HUP

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)

# generated: verbs
verbs='serve stop logs plan inspect convert reference pull doctor selftest tune status chat bench soak eval trace bundle upgrade rollback version ray-head ray-worker recipes patches cache cluster'
# end

# `docker run --user UID:0` brings no home; what a user set and can write stays.
if [[ -z ${HOME:-} || ! -w ${HOME} ]]; then
  HOME=${NIBBLE_CACHE_DIR:-/tmp}
  export HOME
fi

# Natively the project's own environment, in the image whatever is on PATH.
if [[ -x ${root}/.venv/bin/nibble ]]; then
  export VIRTUAL_ENV=${root}/.venv PATH=${root}/.venv/bin:${PATH}
fi

(($#)) || set -- serve
case $1 in
  --help | -h | --version) ;; # nibble's own, with every verb
  -*) set -- serve "$@" ;;    # other flags alone mean serve
esac
if [[ $1 != -* && " ${verbs} " != *" $1 "* ]]; then
  # `bash` is not a special case: with a terminal it is interactive, with the environment set above.
  if ! type -P "$1" >/dev/null; then
    echo "nibble: error: '$1' is neither a verb of nibble nor a program; expected ${verbs// /, }, bash or a program" >&2
    exit 127
  fi
  exec "$@"
fi

if ! command -v nibble >/dev/null; then
  echo "nibble: error: nibble is not installed in ${root}/.venv or on PATH; run \`make setup\`" >&2
  exit 1
fi
# Python takes some 50 ms until nibble can handle a signal; a blocked one waits for that. Not in coreutils before 8.31.
if env --block-signal=TERM true 2>/dev/null; then
  exec env --block-signal=TERM,INT,HUP nibble "$@"
fi
exec nibble "$@"
