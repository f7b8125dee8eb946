# shellcheck shell=bash
# Sourced by every step: strict mode, the build's secrets, settings of apt and pip.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive

# The secret `ca` is the bundle of a private certificate authority. It never enters a layer.
if [[ -r /run/secrets/ca ]]; then
  export SSL_CERT_FILE=/run/secrets/ca PIP_CERT=/run/secrets/ca REQUESTS_CA_BUNDLE=/run/secrets/ca
  export CURL_CA_BUNDLE=/run/secrets/ca GIT_SSL_CAINFO=/run/secrets/ca
fi
# The secret `pip` is a pip.conf for a private package index, possibly with a password in its address.
# Build arguments would show in `docker history` and in provenance attestations.
if [[ -r /run/secrets/pip ]]; then
  export PIP_CONFIG_FILE=/run/secrets/pip
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_DEFAULT_TIMEOUT=120 PIP_ROOT_USER_ACTION=ignore
# pip prefers wheels given to the build (build.sh: NIBBLE_BUILD_WHEELS) to every index.
if compgen -G "/wheels/*.whl" >/dev/null; then
  export PIP_FIND_LINKS=/wheels
fi

# /var/cache/apt and /var/lib/apt are cache mounts, so an install needs no cleanup.
apt_install() {
  rm -f /etc/apt/apt.conf.d/docker-clean
  local options=(-o "Acquire::Retries=3" -o "APT::Install-Recommends=false" -o "Dpkg::Use-Pty=0")
  if [[ -r /run/secrets/ca ]]; then
    options+=(-o "Acquire::https::CAInfo=/run/secrets/ca")
  fi
  apt-get "${options[@]}" -qq update
  apt-get "${options[@]}" -qqy install "$@" >/dev/null
}

# The processor of the image as compilers name it. The build machine's may be another one.
target_machine() {
  case ${TARGETARCH:-$(dpkg --print-architecture)} in
    amd64) echo x86_64 ;;
    arm64) echo aarch64 ;;
    *) echo "error: no image for ${TARGETARCH}; expected: amd64 or arm64" >&2 && exit 6 ;;
  esac
}

# pip of this machine's Python, with wheels for the image's processor: CPython's own variable for cross builds decides which
# wheels fit, and platform.machine() which lines of a lock hold.
pip_for_the_target() {
  local machine
  machine=$(target_machine)
  _PYTHON_HOST_PLATFORM="linux-${machine}" /opt/venv/bin/python -c "import platform, runpy
platform.machine = lambda: '${machine}'
runpy.run_module('pip', run_name='__main__', alter_sys=True)" "$@"
}

# Prints a requirements lock without the entry (and hashes) of the packages named.
lock_without() {
  local lock=$1
  shift
  awk -v names="$*" '
    BEGIN { split(names, list, " "); for (i in list) drop[list[i]] = 1 }
    /^[A-Za-z0-9]/ { name = $0; sub(/[ =\[;<>~!@].*/, "", name); skip = tolower(name) in drop }
    !skip' "$lock"
}
