# Sourced by the lanes. `step NAME LIMIT_S COMMAND …` writes the output to /tmp/R/NAME.log and the exit code to /tmp/R/steps.
# ENVIRON is the runtime's file of variables.
# shellcheck shell=bash disable=SC1090,SC2034
source "${ENVIRON:-/tmp/environ}"
cd /tmp/repo || exit
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
step() {
  local name=$1 limit=$2 begun=${SECONDS} code=0
  shift 2
  echo "$(date +%T) begins ${name}" >>/tmp/R/steps
  timeout -k 5 "${limit}" "$@" >"/tmp/R/${name}.log" 2>&1 &
  local group=$!
  wait "${group}" || code=$?
  kill -KILL -- "-${group}" 2>/dev/null # workers that hang in a kernel outlive the command, and keep the GPU busy
  echo "$(date +%T) ended  ${name} with ${code} after $((SECONDS - begun)) s" >>/tmp/R/steps
}
