#!/usr/bin/env bash
# A private Docker engine for machines without a running one (CI above all): setup/docker_engine.sh up|down|status|run CMD…
# It does not touch an engine that already answers. `run` starts one, runs CMD with DOCKER_HOST set, and stops it.
set -euo pipefail

state=${NIBBLE_ENGINE_DIR:-/var/lib/nibble-engine}
socket=${NIBBLE_ENGINE_SOCKET:-/run/nibble-docker.sock}
pidfile=$state/dockerd.pid
log=$state/dockerd.log
packages=(docker.io debootstrap iptables ca-certificates)

say() { echo "[engine] $*" >&2; }

die() {
  echo "error: $1; expected: $2; try: $3" >&2
  exit 1
}

# A client without buildx cannot build with BuildKit (seen with 28.2 in /usr/local/bin); Debian's 20.10 includes it.
client() {
  local candidate
  for candidate in /usr/bin/docker "$(command -v docker || true)"; do
    [[ -n $candidate && -x $candidate ]] && echo "$candidate" && return
  done
  return 1
}

answers() { DOCKER_HOST=$1 timeout 10 "$(client)" version --format '{{.Server.Version}}' 2>/dev/null; }

install_packages() {
  local missing=() package
  for package in "${packages[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed' || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  command -v apt-get >/dev/null || die "no Docker engine and no apt-get" "a Debian-like system" "install Docker by hand"
  ((EUID == 0)) || die "installing ${missing[*]} needs root" "root, or a running engine" "sudo $0 up"
  say "installing ${missing[*]}"
  local out
  out=$(mktemp)
  if ! { apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends \
    "${missing[@]}"; } >"$out" 2>&1 </dev/null; then
    tail -n 20 "$out" >&2
    die "apt-get could not install ${missing[*]}" "a reachable Debian mirror" "read the lines above"
  fi
  rm -f "$out"
}

start() {
  ((EUID == 0)) || die "starting dockerd needs root" "root, or a running engine" "sudo $0 up"
  mkdir -p "$state/data" "$state/exec"
  # A killed engine leaves its pid file, with which dockerd refuses to start.
  [[ -f $pidfile ]] && ! kill -0 "$(<"$pidfile")" 2>/dev/null && rm -f "$pidfile"
  # Without a limit every changed source adds a layer of several GB to the build cache.
  echo '{"builder": {"gc": {"enabled": true, "defaultKeepStorage": "8GB"}}}' >"$state/daemon.json"
  setsid dockerd --config-file "$state/daemon.json" --data-root "$state/data" --exec-root "$state/exec" --pidfile "$pidfile" \
    -H "unix://$socket" >"$log" 2>&1 </dev/null &
  local i
  for ((i = 0; i < 120; i++)); do
    answers "unix://$socket" >/dev/null && return
    kill -0 $! 2>/dev/null || break
    sleep 0.25
  done
  tail -n 15 "$log" >&2
  die "dockerd did not start" "an engine on $socket within 30 s" "read $log"
}

up() {
  if client >/dev/null && answers "${DOCKER_HOST:-unix:///var/run/docker.sock}" >/dev/null; then
    say "an engine answers already on ${DOCKER_HOST:-unix:///var/run/docker.sock}"
    return
  fi
  install_packages
  if ! answers "unix://$socket" >/dev/null; then
    start
    say "dockerd $(answers "unix://$socket") on $socket, pid $(<"$pidfile"), log $log"
  fi
  export DOCKER_HOST=unix://$socket
}

down() {
  [[ -f $pidfile ]] || return 0
  local pid i
  pid=$(<"$pidfile")
  kill "$pid" 2>/dev/null || true
  for ((i = 0; i < 80; i++)); do
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.25
  done
  rm -f "$pidfile" "$socket"
  say "stopped"
}

# A folder with only this client: /usr/bin first on PATH would also change python3.
client_dir() {
  mkdir -p "$state/bin"
  ln -sfn "$(client)" "$state/bin/docker"
  echo "$state/bin"
}

# Commands for the user's shell to eval.
environment() {
  [[ -n ${DOCKER_HOST:-} ]] && echo "export DOCKER_HOST=$DOCKER_HOST"
  echo "export PATH=$(client_dir):\$PATH DOCKER_BUILDKIT=1"
}

case ${1:-} in
  up) up && environment ;;
  down) down ;;
  status) client >/dev/null && { answers "unix://$socket" || answers "${DOCKER_HOST:-unix:///var/run/docker.sock}"; } ;;
  run)
    shift
    started=
    [[ -f $pidfile ]] && kill -0 "$(<"$pidfile")" 2>/dev/null || started=yes
    up
    [[ -n $started ]] && trap down EXIT
    PATH=$(client_dir):$PATH DOCKER_BUILDKIT=1 "$@"
    ;;
  *)
    echo "usage: $0 up|down|status|run COMMAND…   ('eval \"\$($0 up)\"' sets DOCKER_HOST in this shell)" >&2
    exit 2
    ;;
esac
