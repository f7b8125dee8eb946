# shellcheck shell=bash disable=SC1091
# Sourced by install.sh and serve.sh: what is in this folder (IMAGE, MODEL, TARGET), and the program that runs containers.
source ./bundle.env
engine=${DOCKER:-$(command -v docker || command -v podman || true)}
[[ -n ${engine} ]] || {
  echo "error: no docker and no podman; expected one of them in PATH, or DOCKER; try: install docker" >&2
  exit 3
}
