"""The GPU images as far as a machine without NVIDIA's base images and a GPU can build them."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from nibble.engine.patching.apply import RECORD_FOLDER
from nibble.engine.patching.series import load_series
from tests.support.changes import CONTAINERS
from tests.support.docker.containers import builder, docker, run_once
from tests.support.paths import ROOT
from tests.support.releases.cuda_tools import CUDA, NVCC

GPU_TARGETS = ("gb10", "sm120", "b200", "hopper")
pytestmark = [pytest.mark.docker, pytest.mark.when_changed(*CONTAINERS)]


def build_stage(target: str, stage: str, build_environ: dict[str, str], *arguments: str) -> str:
    """Build one stage of a GPU Dockerfile on the stand-in base with the client that build.sh
    would take.
    """
    base = build_environ["BASE_IMAGE"]
    tag = f"nibble-test-stage:{target}-{stage}"
    options = ["--file", f"docker/Dockerfile.{target}", "--target", stage, "--tag", tag]
    options += ["--network", build_environ["NIBBLE_BUILD_NETWORK"]]
    # Not the packages of NVIDIA's repository: that one comes with NVIDIA's base image.
    for argument in (
        f"BASE_IMAGE={base}",
        f"RUNTIME_IMAGE={base}",
        "RUNTIME_PACKAGES=",
        *arguments,
    ):
        options += ["--build-arg", argument]
    if certificates := os.environ.get("SSL_CERT_FILE"):
        options += ["--secret", f"id=ca,src={certificates}"]
    command = [builder(), "build", *options, "."]
    environ = build_environ | {"DOCKER_BUILDKIT": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1500, check=False
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return tag


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_source_archive_stage_builds_on_the_stand_in_base(
    target: str, build_environ: dict[str, str]
) -> None:
    image = build_stage(target, "vllm-sdist", build_environ)
    found = run_once(image, "grep", "^Version:", "/build/vllm/PKG-INFO")
    assert found.stdout == "Version: 0.32.0\n"
    record = json.loads(run_once(image, "cat", f"/build/vllm/{RECORD_FOLDER}/record.json").stdout)
    assert list(record["patches"]) == [patch.name for patch in load_series("vllm").patches]


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_system_stage_builds_on_the_stand_in_base(
    target: str, build_environ: dict[str, str]
) -> None:
    image = build_stage(target, "system", build_environ)
    found = run_once(
        image, "bash", "-c", "command -v tini && id -u nibble && stat -c %u:%g:%a /var/cache/nibble"
    )
    assert found.stdout.split() == ["/usr/bin/tini", "2000", "2000:0:2775"]


@pytest.mark.slow
def test_kernels_that_were_not_compiled_stop_the_build_in_one_line(
    build_environ: dict[str, str],
) -> None:
    with pytest.raises(AssertionError) as refused:
        build_stage("sm120", "kernels-wheel", build_environ, "VLLM_FROM=wheel")
    assert "error: nibble-kernels was not compiled for sm120" in str(refused.value)


def test_a_base_without_cuda_13_is_refused_in_one_line(build_environ: dict[str, str]) -> None:
    """The compile stage starts here, finds no nvcc and says so before it installs gigabytes."""
    with pytest.raises(AssertionError) as refused:
        build_stage("sm120", "vllm-source", build_environ)
    assert "error: BASE_IMAGE has no CUDA 13 compiler" in str(refused.value)


def test_a_wrong_checksum_is_refused_in_one_line(build_environ: dict[str, str]) -> None:
    with pytest.raises(AssertionError) as refused:
        build_stage("sm120", "vllm-sdist", build_environ, f"VLLM_SDIST_SHA256={'0' * 64}")
    assert "does not have the pinned sha256" in str(refused.value)


@pytest.mark.parametrize("target", ["gb10", "cpu"])
def test_wheels_given_to_a_build_are_in_reach_of_an_image_for_arm(
    target: str, engine: None, tmp_path: Path
) -> None:
    """build.sh imports NIBBLE_BUILD_WHEELS as the engine's platform, whatever the image's is."""
    archive, out, wheels = tmp_path / "wheels.tar", tmp_path / "out", "nibble-test-wheels:given"
    options = ["--platform", "linux/arm64", "--target", "wheels", "--output", str(out)]
    options += ["--build-arg", f"WHEELS_IMAGE={wheels}", "--file", f"docker/Dockerfile.{target}"]
    (tmp_path / "empty.whl").touch()
    subprocess.run(["tar", "-C", tmp_path, "-cf", archive, "empty.whl"], check=True)
    docker("import", str(archive), wheels)
    try:
        done = subprocess.run(
            [builder(), "build", *options, "."],
            cwd=ROOT,
            env=os.environ | {"DOCKER_BUILDKIT": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert (out / "empty.whl").exists()
    finally:
        docker("rmi", wheels)


@pytest.fixture
def cuda_base(base_image: str, tmp_path: Path) -> str:
    """The stand-in base with the CUDA toolkit of this machine, which compiles nibble-kernels and
    FlashInfer's.
    """
    if not NVCC.exists():
        pytest.skip(f"no {NVCC}: CUDA_HOME names another toolkit")
    tag = f"{base_image}-cuda"
    # What a toolkit has to link against where no driver is; the one here may lack it. Its lib64 may
    # be a link, over which no folder can be copied.
    stubs = tmp_path / (CUDA / "lib64").resolve().relative_to(CUDA.resolve()) / "stubs"
    stubs.mkdir(parents=True)
    stub = [
        "-shared",
        "-o",
        str(stubs / "libcuda.so"),
        "-Wl,-soname,libcuda.so.1",
        "-x",
        "c",
        "/dev/null",
    ]
    subprocess.run(["cc", *stub], check=True)
    for base, folder in ((base_image, CUDA.resolve()), (tag, tmp_path)):
        done = subprocess.run(
            [builder(), "build", "--tag", tag, "--file", "-", str(folder)],
            input=f"FROM {base}\nCOPY . /usr/local/cuda\n",
            env=os.environ | {"DOCKER_BUILDKIT": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    return tag


@pytest.mark.slow
def test_the_kernels_wheel_for_gb10_is_made_here_without_emulation(
    build_environ: dict[str, str], cuda_base: str
) -> None:
    """Some 5 GB of Arm wheels for torch's headers and libraries; only its own stages run."""
    done = subprocess.run(
        [ROOT / "build.sh", "gb10", "--kernels"],
        env=build_environ | {"BASE_IMAGE": cuda_base},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (wheel,) = (ROOT / "dist/gb10").glob("nibble_kernels-*-linux_aarch64.whl")
    try:
        names = zipfile.ZipFile(wheel).namelist()
        assert {"nibble_kernels/_cpu.abi3.so", "nibble_kernels/_cuda.abi3.so"} <= set(names)
    finally:
        wheel.unlink()


@pytest.mark.slow
def test_sm120_image_from_the_wheel_builds_on_the_stand_in_base(
    build_environ: dict[str, str], cuda_base: str
) -> None:
    """All of --from wheel but NVIDIA's base: some 5 GB of CUDA wheels, with hashes, the series
    and nibble on top.
    """
    image = build_stage(
        "sm120", "runtime", build_environ | {"BASE_IMAGE": cuda_base}, "VLLM_FROM=wheel"
    )
    ask = "from importlib.metadata import version as v; print(v('vllm'), v('torch'))"
    try:
        found = run_once(image, "python", "-c", ask)
        assert found.stdout.split() == ["0.32.0", "2.13.0"], found.stderr
        report = json.loads(run_once(image, "nibble", "doctor", "--json").stdout)
        checks = {check["name"]: check for check in report["checks"]}
        applicable = [
            patch for patch in load_series("vllm").patches if patch.paths[0].startswith("vllm/")
        ]
        assert checks["patches"]["what"] == f"{len(applicable)} applied"
        words = {line["id"]: line["word"] for line in report["patches"]}
        assert words["N1"] == words["N12"] == "applied", "FlashInfer is in this image"
        assert not {"needed", "failed"} & {*words.values()}
        assert checks["kernels"]["what"].startswith("0.1.0; cpu: compiled; cuda: compiled"), checks[
            "kernels"
        ]
        left = run_once(image, "find", "/tmp", "/var/cache/nibble", "-mindepth", "1")
        assert left.stdout == "/var/cache/nibble/home\n", "what the probes made"
    finally:
        docker("rmi", image)  # more than 10 GB
