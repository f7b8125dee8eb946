#!/usr/bin/env bash
# Builds an image of nibble: ./build.sh TARGET [--from source|wheel] [--remote HOST] [--push]
# TARGET is one of gb10, sm120, b200, hopper, cpu; the image is $IMAGE:TARGET (IMAGE defaults to nibble).
# Also read: BASE_IMAGE, RUNTIME_IMAGE, MAX_JOBS, NIBBLE_TORCH_INDEX; NIBBLE_BUILD_NETWORK=host; NIBBLE_BUILD_WHEELS, a
# folder of wheels that no index has; SSL_CERT_FILE and PIP_CONFIG_FILE, which reach the build as secrets, not as layers.
set -euo pipefail
cd "$(dirname "$0")"

die() {
  echo "error: $1; expected: $2; try: $3" >&2
  exit 2
}

target='' from='' remote='' push=''
while (($#)); do
  case $1 in
    --from) from=${2:-} && shift ;;
    --remote) remote=${2:-} && shift ;;
    --push) push=yes ;;
    gb10 | sm120 | b200 | hopper | cpu) target=$1 ;;
    -h | --help) sed -n '2,6s/^# //p' "$0" && exit 0 ;;
    *) die "unknown argument '$1'" "a target (gb10 sm120 b200 hopper cpu) and its options" "./build.sh --help" ;;
  esac
  shift
done
[[ -n ${target} ]] || die "no target" "gb10, sm120, b200, hopper or cpu" "./build.sh cpu"
case ${from:=$([[ ${target} == cpu ]] && echo wheel || echo source)} in
  source | wheel) ;;
  *) die "--from ${from}" "source or wheel" "./build.sh ${target} --from wheel" ;;
esac
image="${IMAGE:-nibble}:${target}"
[[ -z ${push} || ${image} == */* ]] || die "--push of ${image}" "IMAGE with a registry" "IMAGE=ghcr.io/you/nibble $0 ${target} --push"

# A 23.0 or newer client builds with BuildKit only through buildx; Debian's 20.10 has BuildKit inside.
buildx='' docker=''
for candidate in "${DOCKER:-docker}" /usr/bin/docker; do
  command -v "${candidate}" >/dev/null || continue
  version=$("${candidate}" --version | sed 's/^Docker version \([0-9]*\).*/\1/')
  if "${candidate}" buildx version >/dev/null 2>&1; then
    docker=${candidate} buildx=yes
  elif ((version < 23)); then
    docker=${candidate}
  fi
  [[ -z ${docker} ]] || break
done
[[ -n ${docker} ]] || die "no Docker client that can build with BuildKit" "docker with buildx, or docker 18.09 to 20.10" "install docker-buildx-plugin"

engine=("${docker}")
if [[ -n ${remote} ]]; then
  context="nibble-${remote//[^A-Za-z0-9_.-]/-}"
  "${docker}" context inspect "${context}" >/dev/null 2>&1 ||
    "${docker}" context create "${context}" --docker "host=ssh://${remote}" >/dev/null
  unset DOCKER_HOST # it would win over the context
  engine+=(--context "${context}")
fi
engine_arch=$("${engine[@]}" version --format '{{.Server.Arch}}') ||
  die "no Docker engine answers" "a running engine" "./setup/docker_engine.sh up, or --remote HOST"

arguments=("VLLM_FROM=${from}" "VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml | head -1)")
arguments+=("REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)")
for name in BASE_IMAGE RUNTIME_IMAGE MAX_JOBS; do
  [[ -z ${!name:-} ]] || arguments+=("${name}=${!name}")
done
[[ -z ${NIBBLE_TORCH_INDEX:-} ]] || arguments+=("TORCH_INDEX=${NIBBLE_TORCH_INDEX}")
arguments+=("PATCHES=$(sed -n '/^#/d; s/\.patch.*//p' patches/vllm/series | paste -sd, -)")

if [[ -n ${NIBBLE_BUILD_WHEELS:-} ]]; then
  wheels="nibble-wheels:$(cd "${NIBBLE_BUILD_WHEELS}" && stat -c '%n %s %Y' ./*.whl | sha256sum | cut -c1-16)"
  "${engine[@]}" image inspect "${wheels}" >/dev/null 2>&1 ||
    tar -C "${NIBBLE_BUILD_WHEELS}" -c . | "${engine[@]}" import - "${wheels}" >/dev/null
  arguments+=("WHEELS_IMAGE=${wheels}")
fi

secrets=()
[[ ! -r ${SSL_CERT_FILE:-} ]] || secrets+=("id=ca,src=${SSL_CERT_FILE}")
[[ ! -r ${PIP_CONFIG_FILE:-} || ! -s ${PIP_CONFIG_FILE:-} ]] || secrets+=("id=pip,src=${PIP_CONFIG_FILE}")

if [[ -n ${buildx} ]]; then
  options=(--file docker/docker-bake.hcl "${target}" --set "${target}.tags=${image}")
  for argument in "${arguments[@]}"; do options+=(--set "${target}.args.${argument}"); done
  for secret in "${secrets[@]}"; do options+=(--set "${target}.secrets=${secret}"); done
  [[ -z ${NIBBLE_BUILD_NETWORK:-} ]] ||
    options+=(--set "${target}.network=${NIBBLE_BUILD_NETWORK}" --allow "network.${NIBBLE_BUILD_NETWORK}")
  # Several platforms and attestations only fit in a registry; the local engine gets its own platform.
  if [[ -n ${push} ]]; then options+=(--push); else options+=(--load --set "${target}.platform=linux/${engine_arch}" --set "*.attest="); fi
fi
if [[ ${target} == gb10 && ${engine_arch} != arm64 && (-z ${buildx} || -z ${push}) ]]; then
  die "gb10 is linux/arm64 and this engine is ${engine_arch}" "an arm64 engine" "./build.sh gb10 --remote HOST"
fi
echo "building ${image} (vLLM from ${from}) with ${engine[*]}" >&2
if [[ -n ${buildx} ]]; then
  exec "${engine[@]}" buildx bake "${options[@]}"
fi
options=(--file "docker/Dockerfile.${target}" --tag "${image}" --progress plain)
for argument in "${arguments[@]}"; do options+=(--build-arg "${argument}"); done
for secret in "${secrets[@]}"; do options+=(--secret "${secret}"); done
[[ -z ${NIBBLE_BUILD_NETWORK:-} ]] || options+=(--network "${NIBBLE_BUILD_NETWORK}")
DOCKER_BUILDKIT=1 "${engine[@]}" build "${options[@]}" .
[[ -z ${push} ]] || "${engine[@]}" push "${image}"
