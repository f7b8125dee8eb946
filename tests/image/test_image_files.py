"""The image definitions without an engine: lint, pins, what must agree with what, and the step
that patches vLLM.
"""

from __future__ import annotations

import compileall
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from nibble.cli import container_commands
from nibble.engine.patching.apply import RECORD_FOLDER
from nibble.engine.patching.series import load_series
from nibble.settings.options import Settings
from tests.support.paths import ROOT
from tests.support.releases.patch_series import CHANGES, make_series, make_tree

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
        [hadolint, str(DOCKER / f"Dockerfile.{target}")],
        capture_output=True,
        text=True,
        check=False,
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
    """Shared steps stay shared: a change made in one of the four and forgotten in the others
    fails here.
    """

    def neutral(name: str) -> str:
        text = dockerfile(name).split("\n", 1)[1]
        return re.sub(r'ai\.nibble\.arch="[^"]*"', "", re.sub(rf"\b{name}\b", "TARGET", text))

    assert neutral(target) == neutral("sm120")


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_images_for_gpus_carry_flashinfers_sampling_kernels(target: str) -> None:
    stages = dict(
        re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM )", dockerfile(target), re.M | re.S)
    )
    assert (
        f"python /steps/build_flashinfer.py {target} /flashinfer\n" in stages["flashinfer-commands"]
    )
    assert f"/steps/compile_flashinfer.sh {target} /flashinfer\n" in stages["flashinfer-build"]
    assert "from=flashinfer-build,source=/flashinfer/aot,target=/aot" in stages["kernels"]
    assert "COPY --from=kernels /opt/venv /opt/venv\n" in dockerfile(target)


@pytest.mark.parametrize("target", TARGETS)
def test_compiling_runs_on_the_build_machines_own_processor(target: str) -> None:
    """An image for Arm is then built on x86-64 in minutes; emulated, g++ alone takes longer."""
    text = dockerfile(target)
    assert "FROM --platform=$BUILDPLATFORM ${COMPILERS_IMAGE} AS build-base\n" in text
    native = {"build-base"}
    for image, stage in re.findall(r"^FROM (\S+) AS (\S+)", text, re.M):
        if image in native:
            native.add(stage)
    flashinfer = set() if target == "cpu" else {"flashinfer-build"}
    assert native == {"build-base", "compilers", "vllm-wheel", "kernels-build"} | flashinfer


@pytest.mark.parametrize(("arch", "machine"), [("amd64", "x86_64"), ("arm64", "aarch64")])
def test_pip_takes_a_locks_lines_for_the_images_processor(
    arch: str, machine: str, tmp_path: Path
) -> None:
    """Such as cpu.lock's Intel libraries, which Arm has none of: pip looked for them there."""
    steps = (DOCKER / "steps/common.sh").read_text().replace("/opt/venv", sys.prefix)
    (tmp_path / "common.sh").write_text(steps)
    lock = tmp_path / "lock"
    words = ["pip_for_the_target", "install", "--dry-run", "--no-index", "-r", str(lock)]
    for marked in ("x86_64", "aarch64"):
        lock.write_text(f"no-such-package==1 ; platform_machine == '{marked}'\n")
        done = subprocess.run(
            ["bash", "-c", f"source {tmp_path}/common.sh; {' '.join(words)}"],
            env=os.environ | {"TARGETARCH": arch, "PIP_FIND_LINKS": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode == 0) == (marked != machine), done.stdout + done.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_every_image_has_an_argument_with_a_default(target: str) -> None:
    text = dockerfile(target)
    for image in re.findall(r"^FROM (?:--platform=\S+ )?(\S+)", text, re.M):
        stages = set(re.findall(r"^FROM (?:--platform=\S+ )?\S+ AS (\S+)", text, re.M))
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
    """`tini -g` would signal vLLM's workers too, which breaks streams (measured: 181 of 900
    tokens).
    """
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


# Keys of [Container]; the generator refuses a unit with another one. Ubuntu 24.04 has Podman 4.9.
KEYS_OF_PODMAN_4_7 = set(
    """
    AddCapability AddDevice Annotation AutoUpdate ContainerName DNS DNSOption DNSSearch
    DropCapability Environment EnvironmentFile EnvironmentHost Exec ExposeHostPort Group
    HealthCmd HealthInterval HealthOnFailure HealthRetries HealthStartPeriod HealthStartupCmd
    HealthStartupInterval HealthStartupRetries HealthStartupSuccess HealthStartupTimeout
    HealthTimeout HostName IP Image Label LogDriver Mask Mount Network NoNewPrivileges Notify
    PidsLimit PodmanArgs PublishPort Pull ReadOnly RemapGID RemapUID RemapUIDSize RemapUsers
    Rootfs RunInit SeccompProfile Secret SecurityLabelDisable SecurityLabelFileType
    SecurityLabelLevel SecurityLabelNested SecurityLabelType ShmSize Sysctl Timezone Tmpfs
    Ulimit Unmask User UserNS VolatileTmp Volume WorkingDir
    """.split()
)


def test_stop_timeouts_are_the_drain_and_30_seconds() -> None:
    drain = Settings.model_fields["drain_seconds"].default
    compose = (DOCKER / "compose.yaml").read_text()
    quadlet = (DOCKER / "quadlet" / "nibble.container").read_text()
    assert f"stop_grace_period: {drain + 30}s" in compose
    assert f'NIBBLE_DRAIN_SECONDS: "{drain}"' in compose
    assert f"PodmanArgs=--stop-timeout={drain + 30}\n" in quadlet
    assert f"NIBBLE_DRAIN_SECONDS={drain}\n" in quadlet
    assert "RestartPreventExitStatus=2 5 6 75\n" in quadlet
    unit = quadlet.partition("[Container]")[2].partition("[Service]")[0]
    assert set(re.findall(r"^([A-Z]\w+)=", unit, re.M)) <= KEYS_OF_PODMAN_4_7


def test_compose_and_quadlet_give_what_the_printed_command_gives() -> None:
    (hardened,) = container_commands.hardened_commands()
    words = hardened.replace(" \\\n ", "").split()
    common = yaml.safe_load((DOCKER / "compose.yaml").read_text())["x-common"]
    quadlet = (DOCKER / "quadlet" / "nibble.container").read_text()
    options = dict(pairwise(words))
    assert common["stop_grace_period"] == f"{options['--stop-timeout']}s"
    assert f"PodmanArgs=--stop-timeout={options['--stop-timeout']}\n" in quadlet
    assert (
        common["shm_size"] == f"{options['--shm-size']}b"
        and f"ShmSize={options['--shm-size']}\n" in quadlet
    )
    assert common["tmpfs"] == [options["--tmpfs"]]
    assert f"Tmpfs={options['--tmpfs'].replace(':', ':rw,')}\n" in quadlet
    place = options["-v"].partition(":")[2]
    assert common["volumes"] == [f"cache:{place}"] and f"Volume={options['-v']}\n" in quadlet
    assert common["cap_drop"] == [options["--cap-drop"]] and "DropCapability=all\n" in quadlet
    assert (
        common["security_opt"] == [f"{options['--security-opt']}:true"]
        and "NoNewPrivileges=true\n" in quadlet
    )
    assert "--read-only" in words and common["read_only"] is True and "ReadOnly=true\n" in quadlet
    assert common["command"] == ["serve"] and f"PublishPort={options['-p']}\n" in quadlet
    assert (
        f"Environment=MODEL={words[-1]}\n" in quadlet
        and f"Image=localhost/{words[-3]}\n" in quadlet
    )


def test_the_scripts_run_the_image_as_the_printed_command_does() -> None:
    script = (ROOT / "scripts" / "serve.sh").read_text()
    assert f"--stop-timeout {container_commands.stop_timeout_s()} " in script
    assert f"--volume {container_commands.VOLUME} " in script
    assert "gpus=(--gpus all --ipc host)\n" in script and "--shm-size" not in script


def test_workflow_actions_are_pinned_by_commit() -> None:
    for workflow in (ROOT / ".github" / "workflows").glob("*.yaml"):
        uses = re.findall(r"uses: (\S+)", workflow.read_text())
        assert uses
        for action in uses:
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), f"{workflow.name}: {action}"


def build(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "build.sh"), *args]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environ
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "no target"),
        (("h100",), "unknown argument 'h100'"),
        (("cpu", "--from", "git"), "--from git"),
        (("cpu", "--push"), "IMAGE with a registry"),
        (("sm120", "--kernels", "--push"), "--kernels with --push"),
    ],
)
def test_build_refuses_wrong_arguments_in_one_line(args: tuple[str, ...], said: str) -> None:
    result = build(*args, IMAGE="nibble")
    assert result.returncode == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


KERNEL = {"csrc/kernel.cu": ("// kernel 3\n", "// kernel three\n")}


def patching_stage(folder: Path, target: str) -> Path:
    """A copy of what the stage `patching` of a Dockerfile holds, with a small series in place of
    ours.
    """
    stage = re.search(r"^FROM scratch AS patching\n(.*?)^FROM ", dockerfile(target), re.M | re.S)
    assert stage is not None
    for line in re.findall(r"^COPY (.*)$", stage[1].replace("\\\n", ""), re.M):
        *sources, place = line.split()
        for source in sources:
            whole = (ROOT / source).is_dir()
            to = folder / place.strip("/") / ("" if whole else Path(source).name)
            to.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if whole else shutil.copy)(ROOT / source, to)
    shutil.rmtree(folder / "patches" / "vllm")
    make_series(folder / "patches" / "vllm", CHANGES | {"kernel": KERNEL})
    return folder


def apply_patches(stage: Path, *words: Path) -> subprocess.CompletedProcess[str]:
    """The step as a build runs it, with the standard library and the stage alone (-S: no
    site-packages).
    """
    command = [sys.executable, "-S", str(DOCKER / "steps" / "apply_patches.py"), *map(str, words)]
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(stage), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ)


def is_compiled(path: Path) -> bool:
    """Whether Python would take the bytecode that lies beside it (its header has the source's
    time and size).
    """
    header = Path(importlib.util.cache_from_source(path)).read_bytes()[8:16]
    return struct.unpack("<II", header) == (int(path.stat().st_mtime), path.stat().st_size)


@pytest.mark.parametrize("target", TARGETS)
def test_the_patching_stage_is_enough_to_apply_a_series_and_has_no_probe(
    target: str, tmp_path: Path
) -> None:
    stage = patching_stage(tmp_path / "stage", target)
    assert not [path for path in stage.rglob("*") if "probe" in path.name]
    site = make_tree(tmp_path / "site")
    result = apply_patches(stage, site)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"patches applied to {site}: first, second\n"
    assert "one = 'thirty'\n" in (site / "vllm" / "one.py").read_text()


def test_patched_files_of_an_installed_vllm_are_compiled_again(tmp_path: Path) -> None:
    """At run time site-packages is read-only: stale bytecode would be made again at every start."""
    site = make_tree(tmp_path / "site")
    sources = list((site / "vllm").rglob("*.py"))
    for path in sources:
        os.utime(path, (1, 1))
    compileall.compile_dir(site / "vllm", quiet=1)
    assert apply_patches(patching_stage(tmp_path / "stage", "cpu"), site).returncode == 0
    assert all(is_compiled(path) for path in sources)


def test_a_vllm_compiled_from_patched_source_has_a_record_of_its_own(tmp_path: Path) -> None:
    stage = patching_stage(tmp_path / "stage", "cpu")
    source = make_tree(tmp_path / "source", source=True)
    result = apply_patches(stage, source)
    assert (result.returncode, result.stdout) == (
        0,
        f"patches applied to {source}: first, second, kernel\n",
    )
    site = make_tree(tmp_path / "site")
    shutil.rmtree(site / "vllm")
    shutil.copytree(source / "vllm", site / "vllm")
    result = apply_patches(stage, site, source)
    assert (result.returncode, result.stderr) == (0, "")
    for path in CHANGES["first"]:
        assert (site / path).read_bytes() == (source / path).read_bytes()
    record = json.loads((site / "vllm" / RECORD_FOLDER / "record.json").read_text())
    assert list(record["patches"]) == ["first", "second"]


def test_a_patch_that_does_not_fit_stops_the_build_in_one_line(tmp_path: Path) -> None:
    site = make_tree(tmp_path / "site")
    (site / "vllm" / "one.py").write_text("one = 4\n")
    result = apply_patches(patching_stage(tmp_path / "stage", "cpu"), site)
    assert (result.returncode, result.stdout) == (6, "")
    assert re.fullmatch(r"error: vllm/one\.py in .*\n", result.stderr)
    assert "two = 3\n" in (site / "vllm" / "deep" / "two.py").read_text()


@pytest.mark.parametrize("file", ["build.sh", ".github/workflows/release.yaml"])
def test_the_label_of_an_image_names_the_patches_of_the_series(file: str) -> None:
    command = re.search(r"PATCHES=\$\((.*? -)\)", (ROOT / file).read_text())
    assert command is not None
    named = subprocess.run(
        ["bash", "-c", command[1]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert named.stdout.strip().split(",") == [patch.name for patch in load_series("vllm").patches]


def test_workflows_use_verbs_that_make_has() -> None:
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    used = [
        verb
        for workflow in (ROOT / ".github" / "workflows").glob("*.yaml")
        for verb in re.findall(r"\bmake ([a-z-]+)", workflow.read_text())
    ]
    assert used and set(used) <= verbs


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_source_builds_compile_for_the_arch_list_of_the_target(target: str) -> None:
    command = [sys.executable, str(DOCKER / "steps" / "target_arch.py"), target]
    environ = os.environ | {"TARGETS_DIR": str(ROOT / "targets")}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    assert result.stdout.strip() == target_data(target)["torch_cuda_arch_list"]
    assert result.stdout.strip()[-1] in "af", (
        "plain targets refuse the FP4 instructions (ptxas 13.0)"
    )


@pytest.mark.parametrize(("value", "code"), [("0", 0), ("yes", 2)])
def test_the_build_argument_leaves_the_default_model_out_or_is_refused(
    value: str, code: int
) -> None:
    """With 1 it fetches, which the image does (test_documented_commands.py)."""
    command = ["bash", str(DOCKER / "runtime" / "add_default_model.sh")]
    environ = {"PATH": os.environ["PATH"], "DEMO_MODEL": value}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == code
    assert ("expected: 0 or 1" in done.stderr) is bool(code)
