#!/usr/bin/env bash
# Builds an image of nibble: ./build.sh TARGET [--from source|wheel] [--remote HOST] [--push]
# or nibble-kernels' wheel alone, into dist/TARGET, where `make setup` finds it: ./build.sh TARGET --kernels [--remote HOST]
# TARGET is one of gb10, sm120, b200, hopper, cpu; the image is $IMAGE:TARGET (IMAGE defaults to nibble). --push prints IMAGE@DIGEST.
# Also read: BASE_IMAGE, COMPILERS_IMAGE, RUNTIME_IMAGE, MAX_JOBS, DEMO_MODEL, SBOM_GENERATOR, NIBBLE_TORCH_INDEX;
# NIBBLE_BUILD_NETWORK=host; NIBBLE_BUILD_WHEELS, a folder of wheels that no index has; SSL_CERT_FILE and PIP_CONFIG_FILE: secrets
# of the build, not layers.
set -euo pipefail
cd "$(dirname "$0")"

die() {
  echo "error: $1; expected: $2; try: $3" >&2
  exit 2
}

# Variables of other projects' build scripts, which this one would ignore.
while read -r name instead; do
  [[ -z ${!name:-} ]] || die "${name}=${!name} is of another build script" "${instead}" "unset ${name}"
done <<'END'
IMAGE_NAME IMAGE=NAME, without a tag
IMAGE_TAG the target as tag
IMAGE_VERSION the target as tag
VLLM_COMMIT the vLLM of requirements/
TORCH_VERSION the torch of requirements/
TORCHVISION_VERSION the torchvision of requirements/
TORCHAUDIO_VERSION the torchaudio of requirements/
REMOTE_NODE --remote USER@HOST
REMOTE_USER --remote USER@HOST
REMOTE_BUILD_DIR --remote USER@HOST, which needs no folder
END

# The CPU's wheel is compiled here, with the environment of `make setup`, and tried in a separate environment.
cpu_wheel() {
  [[ -x .venv/bin/python ]] || die "no .venv" "the environment that has torch and setuptools" "make setup"
  command -v "${CXX:-c++}" >/dev/null || die "no C++ compiler" "g++ 12 or newer, or CXX" "install g++"
  local scratch wheel found
  scratch=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '${scratch}'" EXIT
  cp -r kernels "${scratch}/kernels" # setuptools writes beside its sources
  TORCH_CUDA_ARCH_LIST='' PATH="${PWD}/.venv/bin:${PATH}" .venv/bin/python -m pip wheel --quiet --no-deps --no-build-isolation \
    --no-index --wheel-dir "${scratch}/dist" "${scratch}/kernels"
  wheel=$(basename "${scratch}"/dist/*.whl)
  .venv/bin/python -m venv --without-pip "${scratch}/venv"
  # torch from here, nibble-kernels from the wheel: what lies in the environment itself is found first.
  .venv/bin/python -P -c 'import sys; print(*(path for path in sys.path if path.endswith("site-packages")), sep="\n")' \
    >"$(echo "${scratch}"/venv/lib/python3*/site-packages)/outer.pth"
  .venv/bin/python -m pip --python "${scratch}/venv/bin/python" install --quiet --no-deps --no-index --force-reinstall \
    "${scratch}/dist/${wheel}"
  found=$("${scratch}/venv/bin/python" -P -c \
    'import nibble_kernels as kernels; print(kernels.__file__, kernels.implementations()["cpu"])')
  [[ ${found} == "${scratch}/venv/"*" compiled" ]] ||
    die "the wheel does not compute: ${found}" "compiled" "another compiler with CXX"
  mkdir -p dist/cpu
  mv "${scratch}/dist/${wheel}" dist/cpu/
  echo "dist/cpu/${wheel}"
}

target='' from='' remote='' push='' kernels=''
while (($#)); do
  case $1 in
    --from) from=${2:-} && shift ;;
    --remote) remote=${2:-} && shift ;;
    --push) push=yes ;;
    --kernels) kernels=yes ;;
    gb10 | sm120 | b200 | hopper | cpu) target=$1 ;;
    -h | --help) sed -n '2,7s/^# //p' "$0" && exit 0 ;;
    *) die "unknown argument '$1'" "a target (gb10 sm120 b200 hopper cpu) and its options" "./build.sh --help" ;;
  esac
  shift
done
[[ -n ${target} ]] || die "no target" "gb10, sm120, b200, hopper or cpu" "./build.sh cpu"
[[ -z ${kernels} || -z ${push} ]] || die "--kernels with --push" "one of them" "./build.sh ${target} --kernels"
if [[ -n ${kernels} && ${target} == cpu && -z ${remote} ]]; then
  cpu_wheel
  exit
fi
# The kernels' wheel needs torch, not a vLLM compiled for hours.
case ${from:=$([[ ${target} == cpu || -n ${kernels} ]] && echo wheel || echo source)} in
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
platform=${DOCKER_DEFAULT_PLATFORM:-linux/${engine_arch}} # Docker's own variable
# The wheel's stages cross-compile, so no Arm program runs.
[[ -z ${kernels} || ${target} != gb10 || ${from} != wheel ]] || platform=linux/arm64

arguments=("VLLM_FROM=${from}" "VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml | head -1)")
arguments+=("REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)")
for name in BASE_IMAGE COMPILERS_IMAGE RUNTIME_IMAGE MAX_JOBS DEMO_MODEL; do
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
  if [[ -n ${push} ]]; then options+=(--push); else options+=(--set "${target}.platform=${platform}"); fi
  if [[ -n ${kernels} ]]; then
    options+=(--set "${target}.target=kernels-wheel" --set "${target}.output=type=local,dest=dist/${target}")
  elif [[ -z ${push} ]]; then
    options+=(--load)
  fi
fi
if [[ ${target} == gb10 && ${platform} != linux/arm64 && (-z ${buildx} || -z ${push}) ]]; then
  die "gb10 is linux/arm64 and this engine builds for ${platform}" "an arm64 engine, or one that emulates arm64" \
    "./build.sh gb10 --remote HOST, or DOCKER_DEFAULT_PLATFORM=linux/arm64 with QEMU 10 (qemu-user-binfmt)"
fi
# Docker's own builder can do both only with containerd's image store.
if [[ -n ${buildx} && -n ${push} && $("${engine[@]}" buildx inspect) =~ Driver:\ +docker[[:space:]] &&
$("${engine[@]}" info --format '{{.DriverStatus}}') != *io.containerd.snapshotter* ]]; then
  die "this builder cannot push several platforms with an SBOM" "a builder in a container, or containerd's image store" \
    "docker buildx create --use, or ./build.sh ${target} and scripts/push.sh ${target}"
fi
what=${image}
[[ -z ${kernels} ]] || what="dist/${target}/nibble_kernels-*.whl"
echo "building ${what} (vLLM from ${from}) with ${engine[*]}" >&2

# A second tag with the digest keeps this build when a later one takes the name: nibble rollback.
# Of these the newest three stay, each several GB; one that a container uses stays too.
tag_by_digest() {
  local id old
  id=$("${engine[@]}" image inspect --format '{{.Id}}' "${image}")
  id=${id#sha256:}
  "${engine[@]}" tag "${image}" "${image}-${id:0:12}"
  echo "${image}-${id:0:12}"
  "${engine[@]}" image ls --format '{{.Repository}}:{{.Tag}}' --filter "reference=${image}-*" | tail -n +4 |
    while read -r old; do
      "${engine[@]}" image rm "${old}" >/dev/null 2>&1 && echo "removed ${old}, an older build" >&2
    done || true
}

if [[ -n ${buildx} ]]; then
  [[ -z ${push} ]] || written=$(mktemp)
  ATTEST=${push:-no} "${engine[@]}" buildx bake "${options[@]}" ${push:+--metadata-file "${written}"}
  if [[ -n ${push} ]]; then
    echo "${image%:*}@$(sed -n 's/.*"containerimage.digest": "\(sha256:[0-9a-f]*\)".*/\1/p' "${written}")"
    rm -f "${written}"
  elif [[ -z ${kernels} ]]; then
    tag_by_digest
  fi
  exit
fi
options=(--file "docker/Dockerfile.${target}" --progress plain --platform "${platform}")
if [[ -n ${kernels} ]]; then options+=(--target kernels-wheel --output "dist/${target}"); else options+=(--tag "${image}"); fi
for argument in "${arguments[@]}"; do options+=(--build-arg "${argument}"); done
for secret in "${secrets[@]}"; do options+=(--secret "${secret}"); done
[[ -z ${NIBBLE_BUILD_NETWORK:-} ]] || options+=(--network "${NIBBLE_BUILD_NETWORK}")
DOCKER_BUILDKIT=1 "${engine[@]}" build "${options[@]}" .
if [[ -n ${push} ]]; then
  tag_by_digest >/dev/null
  "${engine[@]}" push --quiet "${image}" >/dev/null
  # An image has a repository digest only after a push.
  "${engine[@]}" image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "${image}" | grep -F "${image%:*}@"
elif [[ -z ${kernels} ]]; then
  tag_by_digest
fi
