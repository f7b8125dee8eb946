"""The release workflow's steps, run against a registry here (tests/support/workflow.py)."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.docker import registry as registries
from tests.support.docker.plugins import docker_plugins
from tests.support.docker.second_engine import second_engine
from tests.support.paths import ROOT
from tests.support.workflow import Expression, Runner, StepFailed

pytestmark = [
    pytest.mark.docker,
    pytest.mark.usefixtures("arm"),
]
VERSION = "v1.2.3"
TARGETS = ("cpu", "gb10", "sm120", "b200", "hopper")


@pytest.fixture(scope="module")
def released(arm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Runner, Path]]:
    """The workflow after a tag was pushed, and the workspace of its last job."""
    folder = tmp_path_factory.mktemp("release")
    with (
        registries.registry(folder / "registry") as registry,
        second_engine(folder / "engine") as engine,
    ):
        runner = make_runner(folder, registry, engine.client, engine.host)
        for matrix in runner.matrix("build"):
            runner.run("build", **matrix)
        yield runner, runner.run("publish")


def make_runner(folder: Path, registry: registries.Registry, client: str, host: str) -> Runner:
    checkout = registries.checkout(folder / "repository")
    programs = folder / "programs"
    programs.mkdir()
    (programs / "docker").symlink_to(client)
    environ = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(folder),
        "DOCKER_HOST": host,
        "DOCKER_CONFIG": str(docker_plugins(folder / "docker-config")),
        "SSL_CERT_FILE": str(registry.authority),
        "SBOM_GENERATOR": f"{registry.name}/scanner:1",
    }
    assert registries.login(registry, client, environ) == 0
    (checkout / "Dockerfile.scanner").write_text(registries.SCANNER)
    (checkout / "scan.sh").write_text(registries.SCAN)
    words = ["--tag", environ["SBOM_GENERATOR"], "--provenance=false", "--push", "."]
    subprocess.run(
        [client, "buildx", "build", "--file", "Dockerfile.scanner", *words],
        cwd=checkout, env=environ, check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    github = {
        "repository": "you/nibble",
        "ref": f"refs/tags/{VERSION}",
        "ref_name": VERSION,
        "sha": "0123456789abcdef0123456789abcdef01234567",
        "actor": registries.USER,
        "token": registries.PASSWORD,
    }
    workflow = ROOT / ".github/workflows/release.yaml"
    return Runner(workflow, registry.name, checkout, folder / "run", environ, github)


def inspect(runner: Runner, name: str, *words: str) -> str:
    done = subprocess.run(
        ["docker", "buildx", "imagetools", "inspect", name, *words],
        env=dict(runner.environ), check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.stdout


def test_every_target_is_published_for_its_platforms(released: tuple[Runner, Path]) -> None:
    runner, _ = released
    image = f"{runner.registry}/you/nibble"
    for target in TARGETS:
        raw = json.loads(inspect(runner, f"{image}:{target}", "--raw"))
        built = sorted(one["arch"] for one in runner.matrix("build") if one["target"] == target)
        parts = [one["platform"]["architecture"] for one in raw["manifests"]]
        assert sorted(part for part in parts if part != "unknown") == built
        assert parts.count("unknown") == len(built)  # SBOM and provenance of each
        assert inspect(runner, f"{image}:{target}-{VERSION}", "--raw") == inspect(
            runner, f"{image}:{target}", "--raw"
        )


def test_the_release_gets_the_names_pinned_by_digest(released: tuple[Runner, Path]) -> None:
    runner, workspace = released
    lines = (workspace / "images.txt").read_text().splitlines()
    assert [line.partition("@")[0].rpartition(":")[2] for line in lines] == list(TARGETS)
    for line in lines:
        tag, _, digest = line.partition("@")
        assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest)
        assert json.loads(inspect(runner, f"{tag.rpartition(':')[0]}@{digest}", "--raw"))
    calls = runner.gh_log.read_text().splitlines()
    assert [call.split()[1] for call in calls] == ["view", "create", "upload"]
    assert f"release upload {VERSION} images.txt" in calls[-1]


def test_images_carry_version_and_commit(released: tuple[Runner, Path]) -> None:
    runner, _ = released
    image = f"{runner.registry}/you/nibble:gb10"
    configuration = json.loads(inspect(runner, image, "--format", "{{json .Image}}"))
    labels = (configuration.get("linux/arm64") or configuration)["config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == VERSION
    assert labels["org.opencontainers.image.revision"] == runner.github["sha"]


def test_a_release_without_one_of_its_builds_fails(
    released: tuple[Runner, Path], tmp_path: Path
) -> None:
    runner, _ = released
    (runner.artifacts / "digest-gb10-arm64").rename(tmp_path / "kept")
    again = Runner(
        runner.workflow, runner.registry, runner.checkout, tmp_path / "run",
        runner.environ, runner.github,
    )  # fmt: skip
    again.artifacts = runner.artifacts
    try:
        with pytest.raises(StepFailed, match="gb10"):
            again.run("publish")
    finally:
        (tmp_path / "kept").rename(runner.artifacts / "digest-gb10-arm64")
    assert not again.gh_log.exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("matrix.target == 'cpu' && 'wheel' || inputs.from || 'source'", "source"),
        ("matrix.arch == 'arm64' && (vars.NONE || 'ubuntu-24.04-arm') || 'x'", "ubuntu-24.04-arm"),
        ("startsWith(github.ref, 'refs/tags/')", True),
    ],
)
def test_expressions_of_the_workflow(text: str, value: object) -> None:
    contexts = {"matrix": {"target": "gb10", "arch": "arm64"}, "github": {"ref": "refs/tags/v1"}}
    assert Expression(text, contexts).value() == value
