# docker buildx bake -f docker/docker-bake.hcl [TARGET...]    build.sh calls it if buildx is present.
# build.sh and the release workflow set secrets (ca, pip), tags and the network, which differ by machine.

variable "IMAGE" { default = "nibble" }
variable "VERSION" { default = "dev" }
variable "REVISION" { default = "unknown" }
variable "PATCHES" { default = "none" }
# `no` for an image that stays in an engine, which has no place for attestations. An empty --set attest= ends buildx 0.13.
variable "ATTEST" { default = "yes" }
# An image that lists the packages of a built one. Empty: docker/buildkit-syft-scanner, which comes from Docker Hub.
variable "SBOM_GENERATOR" { default = "" }

group "default" { targets = ["cpu"] }
group "gpu" { targets = ["gb10", "sm120", "b200", "hopper"] }
group "all" { targets = ["gpu", "cpu"] }

target "_common" {
  context = "."
  args = {
    VERSION  = VERSION
    REVISION = REVISION
    PATCHES  = PATCHES
  }
  # Provenance with mode=max records build arguments, so passwords are always secrets.
  attest = ATTEST != "yes" ? [] : [
    "type=provenance,mode=max",
    SBOM_GENERATOR == "" ? "type=sbom" : "type=sbom,generator=${SBOM_GENERATOR}",
  ]
}

target "gb10" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.gb10"
  platforms  = ["linux/arm64"]
  tags       = ["${IMAGE}:gb10"]
}

target "sm120" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.sm120"
  platforms  = ["linux/amd64"]
  tags       = ["${IMAGE}:sm120"]
}

target "b200" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.b200"
  platforms  = ["linux/amd64", "linux/arm64"]
  tags       = ["${IMAGE}:b200"]
}

target "hopper" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.hopper"
  platforms  = ["linux/amd64", "linux/arm64"]
  tags       = ["${IMAGE}:hopper"]
}

target "cpu" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cpu"
  platforms  = ["linux/amd64", "linux/arm64"]
  tags       = ["${IMAGE}:cpu"]
}
