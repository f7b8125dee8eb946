#!/bin/bash
# Stage `base`: the distribution's Python, a compiler (vLLM, kernels and pip packages without a wheel) and /opt/venv.
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$0")/common.sh"

apt_install python3 python3-dev python3-venv gcc g++ git ca-certificates ccache curl
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: BASE_IMAGE has $(python3 -V); nibble needs Python 3.11 or newer, e.g. Debian 12 or Ubuntu 24.04" >&2
  exit 6
}
python3 -m venv /opt/venv
