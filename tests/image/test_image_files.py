"""The image definitions without an engine: lint, pins, what must agree with what, and the patch step."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nibble.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
TARGETS = ("gb10", "sm120", "b200", "hopper", "cpu")
GPU_TARGETS = TARGETS[:-1]


def dockerfile(target: str) -> str:
    return (DOCKER / f"Dockerfile.{target}").read_text()


def target_data(target: str) -> dict:
    return tomllib.loads((ROOT / "targets" / f"{target}.toml").read_text())


def defaults(text: str) -> dict[str, str]:
    """Name -> default of every ARG before the first FROM."""
    return dict(re.findall(r"^ARG (\w+)=(.*)$", text.split("\nFROM ", 1)[0], re.M))


@pytest.mark.parametrize("target", TARGETS)
def test_hadolint_finds_nothing(target: str) -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert hadolint, "hadolint is in requirements/dev.lock: make test installs it"
    result = subprocess.run(
        [hadolint, str(DOCKER / f"Dockerfile.{target}")], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("target", TARGETS)
def test_base_images_and_arch_are_those_of_the_target(target: str) -> None:
    data, args = target_data(target), defaults(dockerfile(target))
    base = args["BASE_IMAGE"]
    assert base == data["image"]["base"]
    assert args["RUNTIME_IMAGE"].replace("${BASE_IMAGE}", base) == data["image"]["runtime_base"]
    assert f'ai.nibble.arch="{data["torch_cuda_arch_list"]}"' in dockerfile(target)


@pytest.mark.parametrize("target", TARGETS)
def test_versions_are_those_of_the_locks(target: str) -> None:
    args = defaults(dockerfile(target))
    lock = (ROOT / "requirements" / "cuda.lock").read_text()
    assert f"\nvllm=={args['VLLM_VERSION']} " in lock
    assert f"\ntorch=={args['TORCH_VERSION']} " in lock


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_gpu_dockerfiles_differ_in_their_target_only(target: str) -> None:
    """Shared steps stay shared: a change made in one of the four and forgotten in the others fails here."""

    def neutral(name: str) -> str:
        text = dockerfile(name).split("\n", 1)[1]
        return re.sub(r'ai\.nibble\.arch="[^"]*"', "", re.sub(rf"\b{name}\b", "TARGET", text))

    assert neutral(target) == neutral("sm120")


@pytest.mark.parametrize("target", TARGETS)
def test_every_image_has_an_argument_with_a_default(target: str) -> None:
    text = dockerfile(target)
    for image in re.findall(r"^FROM (\S+)", text, re.M):
        stages = set(re.findall(r"^FROM \S+ AS (\S+)", text, re.M))
        if image in stages | {"scratch", "vllm-${VLLM_FROM}"}:
            continue
        name = image.removeprefix("${").removesuffix("}")
        assert name in defaults(text), f"FROM {image}"


@pytest.mark.parametrize("target", TARGETS)
def test_dockerfiles_need_no_newer_frontend_than_20_10(target: str) -> None:
    text = dockerfile(target)
    for newer in ("# syntax", "<<", "--link", "--start-interval", "--chmod", "--parents"):
        assert newer not in text, newer


@pytest.mark.parametrize("target", TARGETS)
def test_signals_reach_one_process_and_health_follows_the_mode(target: str) -> None:
    """`tini -g` would signal vLLM's workers too, which breaks streams (measured: 181 of 900 tokens)."""
    text = dockerfile(target)
    assert 'ENTRYPOINT ["tini", "--", "/opt/nibble/docker/start.sh"]' in text
    assert "STOPSIGNAL SIGTERM" in text
    assert "healthcheck.py" in text


@pytest.mark.parametrize("target", TARGETS)
def test_bake_builds_the_platforms_of_the_target(target: str) -> None:
    bake = (DOCKER / "docker-bake.hcl").read_text()
    block = re.search(rf'target "{target}" {{(.*?)\n}}', bake, re.S)
    assert block is not None
    platforms = re.search(r"platforms\s*=\s*\[(.*)\]", block[1])
    assert platforms is not None
    assert re.findall(r'"(.*?)"', platforms[1]) == target_data(target)["platforms"]


def test_stop_timeouts_are_the_drain_and_30_seconds() -> None:
    drain = Settings.model_fields["drain_seconds"].default
    compose = (DOCKER / "compose.yaml").read_text()
    quadlet = (DOCKER / "quadlet" / "nibble.container").read_text()
    assert f"stop_grace_period: {drain + 30}s" in compose
    assert f'NIBBLE_DRAIN_SECONDS: "{drain}"' in compose
    assert f"StopTimeout={drain + 30}\n" in quadlet
    assert f"NIBBLE_DRAIN_SECONDS={drain}\n" in quadlet
    assert "RestartPreventExitStatus=75\n" in quadlet


def test_workflow_actions_are_pinned_by_commit() -> None:
    for workflow in (ROOT / ".github" / "workflows").glob("*.yaml"):
        uses = re.findall(r"uses: (\S+)", workflow.read_text())
        assert uses
        for action in uses:
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), f"{workflow.name}: {action}"


def build(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "build.sh"), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environ)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "no target"),
        (("h100",), "unknown argument 'h100'"),
        (("cpu", "--from", "git"), "--from git"),
        (("cpu", "--push"), "IMAGE with a registry"),
    ],
)
def test_build_refuses_wrong_arguments_in_one_line(args: tuple[str, ...], said: str) -> None:
    result = build(*args, IMAGE="nibble")
    assert result.returncode == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


HELLO = "one\ntwo\nthree\n"
GOOD_PATCH = "--- a/pkg/hello.py\n+++ b/pkg/hello.py\n@@ -1,3 +1,3 @@\n one\n-two\n+TWO\n three\n"
BAD_PATCH = "--- a/pkg/other.py\n+++ b/pkg/other.py\n@@ -1,3 +1,3 @@\n one\n-four\n+FOUR\n three\n"


def apply_patches(tmp_path: Path, series: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    tree, patches = tmp_path / "tree", tmp_path / "patches" / "vllm"
    (tree / "pkg").mkdir(parents=True)
    patches.mkdir(parents=True)
    for name in ("hello.py", "other.py"):
        (tree / "pkg" / name).write_text(HELLO)
    (patches / "good.patch").write_text(GOOD_PATCH)
    (patches / "bad.patch").write_text(BAD_PATCH)
    (patches / "series").write_text(series)
    command = [str(DOCKER / "steps" / "apply_patches.sh"), "vllm", str(tree)]
    environ = os.environ | {"PATCHES_DIR": str(patches.parent)}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environ
    ), tree / "pkg" / "hello.py"


def test_patch_series_is_applied(tmp_path: Path) -> None:
    result, hello = apply_patches(tmp_path, "# a comment\ngood.patch  # why\n")
    assert (result.returncode, result.stdout) == (0, "patched vllm: good.patch\n")
    assert hello.read_text() == "one\nTWO\nthree\n"


def test_patch_series_is_all_or_nothing(tmp_path: Path) -> None:
    result, hello = apply_patches(tmp_path, "good.patch\nbad.patch\n")
    assert result.returncode == 6
    assert "does not apply" in result.stderr
    assert hello.read_text() == HELLO


def test_no_series_is_no_patch(tmp_path: Path) -> None:
    command = [str(DOCKER / "steps" / "apply_patches.sh"), "vllm", str(tmp_path)]
    environ = os.environ | {"PATCHES_DIR": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert (result.returncode, result.stdout) == (0, "no patches for vllm\n")


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_source_builds_compile_for_the_arch_list_of_the_target(target: str) -> None:
    command = [sys.executable, str(DOCKER / "steps" / "target_arch.py"), target]
    environ = os.environ | {"TARGETS_DIR": str(ROOT / "targets")}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    assert result.stdout.strip() == target_data(target)["torch_cuda_arch_list"]
    assert result.stdout.strip()[-1] in "af", "plain targets refuse the FP4 instructions (design.md 5)"
