#!/usr/bin/env bash
# Entry point, natively and in the image: serve (default), ray-head, ray-worker, bash; anything else is executed as given.
set -euo pipefail
trap 'echo "[nibble] stop signal before the start: stopped; nothing was being served" >&2; exit 0' TERM INT HUP

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)

# `docker run --user UID:0` brings no home; what a user set and can write stays.
if [[ -z ${HOME:-} || ! -w ${HOME} ]]; then
  HOME=${NIBBLE_CACHE_DIR:-/tmp}
  export HOME
fi

# Natively the project's own environment, in the image whatever is on PATH.
if [[ -x ${root}/.venv/bin/nibble ]]; then
  export VIRTUAL_ENV=${root}/.venv PATH=${root}/.venv/bin:${PATH}
fi

mode=${1:-serve}
case ${mode} in
  serve | ray-head | ray-worker)
    shift || true
    ;;
  -*) mode=serve ;; # flags alone mean serve
  # `bash` is no special case: with a terminal it is interactive, with the environment set above.
  *)
    if ! type -P "$1" >/dev/null; then
      echo "nibble: error: '$1' is neither a mode nor a program; expected serve, ray-head, ray-worker, bash or a program" >&2
      exit 127
    fi
    exec "$@"
    ;;
esac

if ! command -v nibble >/dev/null; then
  echo "nibble: error: nibble is not installed in ${root}/.venv or on PATH; run \`make setup\`" >&2
  exit 1
fi
# Python takes some 50 ms until nibble can handle a signal; a blocked one waits for that. Not in coreutils before 8.31.
if env --block-signal=TERM true 2>/dev/null; then
  exec env --block-signal=TERM,INT,HUP nibble "${mode}" "$@"
fi
exec nibble "${mode}" "$@"
