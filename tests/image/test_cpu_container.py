"""The CPU image in real containers: users, caches, secrets, health and stops, seen from outside."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nibble.engine.patching.run import probe_names
from nibble.engine.patching.series import load_series
from nibble.machine.paths import root
from tests.support.changes import CONTAINERS
from tests.support.docker.containers import (
    HARDENED,
    Answer,
    Container,
    docker,
    run_once,
    running,
    volume,
)
from tests.support.docker.served_containers import KEY, chat, trouble

pytestmark = pytest.mark.docker

DEMO = "/opt/nibble/models/nibble-demo"
CACHE_IN_MEMORY = ("--tmpfs", "/var/cache/nibble:exec,size=512m")
# Takes 50 MiB twice a second, slower than the watchdog looks.
HOG = (
    "import time; held = []\nwhile True: held.append(bytearray(b'x') * (50 << 20)); time.sleep(0.5)"
)


@pytest.fixture(scope="module")
def slow_server(cpu_image: str, slow_hub_cache: Path) -> Iterator[Container]:
    """Another user, and a read-only Hugging Face cache where vLLM's guides mount it."""
    with volume() as cache:
        options = [*HARDENED, "--user", "1234:0", "--publish", "127.0.0.1::8000"]
        # Random weights: the canary's questions have no right answer here, nor one in time.
        options += ["--env", f"NIBBLE_API_KEY={KEY}", "--env", "NIBBLE_CANARY=off"]
        options += ["--volume", f"{slow_hub_cache}:/root/.cache/huggingface:ro"]
        options += [
            "--volume",
            f"{cache}:/var/cache/nibble",
            "--env",
            "VLLM_EXTRA_ARGS=--enforce-eager",
        ]
        with running(cpu_image, "serve", "test/slow", options=options) as container:
            container.wait_healthy()
            yield container


@pytest.mark.slow  # tests/e2e/test_serve.py drains without a container
class TestDrain:
    TOKENS = 600

    def test_a_complete_read_only_cache_is_usable_by_another_user(
        self, slow_server: Container
    ) -> None:
        assert slow_server.exec("id", "-u").stdout.strip() == "1234"
        assert "/root/.cache/huggingface is read-only" in slow_server.logs()
        assert chat(slow_server, KEY, "hello", max_tokens=2).status == 200

    def test_docker_stop_lets_a_streaming_answer_finish(self, slow_server: Container) -> None:
        """Not [DONE], which an aborted stream has too: the finish reason and the number of
        tokens.
        """
        payload = {
            "model": "default",
            "messages": [{"role": "user", "content": "hello"}],
            "ignore_eos": True,
        }
        payload |= {"max_tokens": self.TOKENS, "stream_options": {"include_usage": True}}
        chunks = []
        stopper: threading.Thread | None = None
        late: list[Answer] = []
        for chunk in slow_server.stream(payload, KEY):
            chunks.append(chunk)
            if stopper is None and len(chunks) == 20:
                stopper = threading.Thread(
                    target=docker, args=("stop", "--time", "60", slow_server.id)
                )
                stopper.start()
            if stopper is not None and len(chunks) == 80:
                late.append(chat(slow_server, KEY, "too late", max_tokens=2))
        assert stopper is not None, "the answer was over before the signal"
        stopper.join(timeout=90)
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert [reason for reason in reasons if reason] == ["length"]
        assert chunks[-1]["usage"]["completion_tokens"] == self.TOKENS
        assert [answer.status for answer in late] == [503]
        assert slow_server.exit_code() == 0
        assert trouble(slow_server.logs()) == ""


class TestMemoryLimit:
    """`docker run --memory`: the container's limit is what there is."""

    def test_what_cannot_fit_is_refused_with_the_sum(self, cpu_image: str) -> None:
        result = run_once(
            cpu_image, "serve", DEMO, options=[*HARDENED, *CACHE_IN_MEMORY, "--memory", "1500m"]
        )
        assert result.returncode == 7, result.stderr
        assert re.search(
            r"does not fit: weights .* = \d\.\d GiB needed; 1\.\d GiB available of 1\.5 GiB"
            r" \(cgroup ",
            result.stderr,
        )
        assert "a higher limit of that cgroup" in result.stderr

    # tests/e2e/test_memory_watchdog.py has the same in a cgroup without a container
    @pytest.mark.slow
    def test_the_watchdog_stops_the_engine_and_the_kernel_has_nothing_to_kill(
        self, cpu_image: str
    ) -> None:
        options = [*HARDENED, *CACHE_IN_MEMORY, "--memory", "3400m", "--memory-swap", "3400m"]
        options += ["--env", "NIBBLE_MEMORY_RESERVE_GIB=0.75"]
        with running(cpu_image, "serve", DEMO, options=options) as container:
            container.wait_healthy()
            container.exec("python", "-c", HOG, options=["--detach"])
            assert container.exit_code() == 7
            assert container.inspect()["State"]["OOMKilled"] is False
            assert re.search(r"\[nibble\] .*new requests get 503 until", container.logs())
            assert re.search(
                r"nibble: error: stopped the engine in phase ready: 0\.\d+ GiB of memory are"
                r" available \(cgroup ",
                container.logs(),
            )


class TestCores:
    """`docker run --cpus` and `--cpuset-cpus`: a thread for each core that the container gets."""

    @pytest.mark.parametrize(
        ("options", "threads", "reason"),
        [
            (("--cpus", "0.5"), 1, "of which the cgroup's quota gives 0.5"),
            (("--cpus", "1"), 1, "of which the cgroup's quota gives 1"),
            (("--cpuset-cpus", "0"), 1, "one for each of 1 physical core"),
        ],
    )
    def test_the_plan_has_a_thread_for_each(
        self, cpu_image: str, options: tuple[str, str], threads: int, reason: str
    ) -> None:
        words = ["nibble", "plan", DEMO, "--json"]
        found = run_once(cpu_image, *words, options=[*HARDENED, *CACHE_IN_MEMORY, *options])
        choice = json.loads(found.stdout)["env"]["OMP_NUM_THREADS"]
        assert choice["value"] == str(threads) and reason in choice["reason"]


class TestOtherModes:
    def test_bash_gives_a_shell_with_the_environment_set(self, cpu_image: str) -> None:
        result = run_once(
            cpu_image, "bash", "-c", "echo $HF_HOME $NIBBLE_TARGET; command -v nibble"
        )
        assert result.stdout.split() == [
            "/var/cache/nibble/huggingface",
            "cpu",
            "/opt/venv/bin/nibble",
        ]

    def test_manifests_come_from_the_images_own_bases(self, cpu_image: str) -> None:
        options = ["--env", "HEAD_IP=head", "--env", "NIBBLE_NNODES=2", "--env", "NUM_GPUS=1"]
        words = ["cluster", "manifest", "lws", "nibble-demo-nvfp4", "--tensor-parallel-size", "2"]
        found = json.loads(docker("run", "--rm", *options, cpu_image, *words).stdout)
        assert (found["kind"], found["metadata"]["name"]) == (
            "LeaderWorkerSet",
            "nibble-demo-nvfp4",
        )

    def test_an_unknown_command_is_executed_as_given(self, cpu_image: str) -> None:
        result = run_once(cpu_image, "python", "-c", "print('as given')", options=HARDENED)
        assert (result.returncode, result.stdout) == (0, "as given\n")

    def test_a_flag_first_means_serve(self, cpu_image: str) -> None:
        result = run_once(cpu_image, "--max-model-len", "many")
        assert result.returncode == 2
        assert "max-model-len" in result.stderr.lower()

    def test_a_pull_without_a_model_is_exit_2_in_one_line(self, cpu_image: str) -> None:
        result = run_once(cpu_image, "pull")
        assert result.returncode == 2
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1
        assert "MODEL" in result.stderr

    @pytest.mark.when_changed(*CONTAINERS)
    def test_ray_head_comes_up_and_is_healthy(self, cpu_image: str) -> None:
        options = [
            *HARDENED,
            "--env",
            "RAY_AUTH_TOKEN=0123456789abcdef0123456789abcdef",
            "--tmpfs",
            "/var/cache/nibble",
        ]
        with running(cpu_image, "ray-head", options=options) as head:
            head.wait_healthy(120)
            connect = (
                "import socket as s; s.create_connection((s.gethostbyname(s.gethostname()),"
                " 6379), 5)"
            )
            assert head.exec("python", "-c", connect).returncode == 0
            docker("stop", "--time", "30", head.id)
            assert "0123456789abcdef0123456789abcdef" not in head.logs()


def environment_with(image: str, mount: str, user: str = "2000:0") -> tuple[str, str, int]:
    result = run_once(image, "bash", "-c", "env", options=["--volume", mount, "--user", user])
    return result.stdout, result.stderr, result.returncode


class TestSeedMounts:
    """Host caches where vLLM's guides mount them, for every user of the container."""

    def test_a_writable_hugging_face_cache_is_used(self, cpu_image: str, tmp_path: Path) -> None:
        tmp_path.chmod(0o777)
        environ, _, code = environment_with(
            cpu_image, f"{tmp_path}:/root/.cache/huggingface", "4321:0"
        )
        assert code == 0
        assert "HF_HOME=/root/.cache/huggingface\n" in environ
        assert "HF_HUB_OFFLINE" not in environ

    def test_an_unreadable_hugging_face_cache_is_one_line_with_the_fix(
        self, cpu_image: str, tmp_path: Path
    ) -> None:
        tmp_path.chmod(0o700)
        _, said, code = environment_with(cpu_image, f"{tmp_path}:/root/.cache/huggingface")
        assert code == 4
        assert len(said.splitlines()) == 1
        assert "cannot be read by user 2000:0" in said
        assert "--user" in said

    @pytest.mark.parametrize(
        ("place", "setting"),
        [
            ("/root/.cache/flashinfer", "FLASHINFER_WORKSPACE_BASE=/root\n"),
            ("/root/.cache/vllm", "VLLM_CACHE_ROOT=/root/.cache/vllm\n"),
            (
                "/root/.cache/vllm/torch_compile_cache",
                "VLLM_CACHE_ROOT=/var/cache/nibble/vllm-seed\n",
            ),
            ("/root/.triton", "TRITON_CACHE_DIR=/root/.triton/cache\n"),
        ],
    )
    def test_compile_caches_are_used(
        self, cpu_image: str, tmp_path: Path, place: str, setting: str
    ) -> None:
        tmp_path.chmod(0o777)
        environ, said, code = environment_with(cpu_image, f"{tmp_path}:{place}")
        assert (code, said) == (0, "")
        assert setting in environ

    def test_the_torch_compile_mount_receives_what_vllm_writes(
        self, cpu_image: str, tmp_path: Path
    ) -> None:
        tmp_path.chmod(0o777)
        mount = f"{tmp_path}:/root/.cache/vllm/torch_compile_cache"
        write = (
            "cd $VLLM_CACHE_ROOT && mkdir -p torch_compile_cache && echo graph >"
            " torch_compile_cache/g"
        )
        assert run_once(cpu_image, "bash", "-c", write, options=["--volume", mount]).returncode == 0
        assert (tmp_path / "g").read_text() == "graph\n"

    def test_without_mounts_everything_is_under_the_cache_volume(self, cpu_image: str) -> None:
        environ = run_once(cpu_image, "bash", "-c", "env").stdout
        homes = (
            "HOME XDG_CACHE_HOME HF_HOME VLLM_CACHE_ROOT VLLM_CONFIG_ROOT TORCHINDUCTOR_CACHE_DIR"
        )
        for name in [*homes.split(), "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"]:
            assert re.search(rf"^{name}=/var/cache/nibble(/|$)", environ, re.M), name


class TestImage:
    def test_labels_say_what_is_inside(self, cpu_image: str, image_config: dict) -> None:
        labels = image_config["Labels"]
        found = run_once(
            cpu_image,
            "python",
            "-c",
            "import importlib.metadata as m; print(m.version('vllm'), m.version('torch'))",
        )
        vllm, torch = found.stdout.split()
        assert vllm.split("+")[0] == labels["ai.nibble.vllm"]
        assert torch.split("+")[0] == labels["ai.nibble.torch"]
        assert labels["ai.nibble.target"] == "cpu"
        assert labels["ai.nibble.patches"].split(",") == [
            patch.name for patch in load_series("vllm").patches
        ]
        assert re.fullmatch(r"[0-9a-f]{40}", labels["org.opencontainers.image.revision"])

    def test_configuration_is_the_promised_one(self, image_config: dict) -> None:
        assert image_config["User"] == "2000:0"
        assert image_config["StopSignal"] == "SIGTERM"
        assert list(image_config["ExposedPorts"]) == ["8000/tcp"]
        assert image_config["Entrypoint"][:2] == ["tini", "--"]
        assert image_config["Cmd"] == ["serve"]

    def test_no_build_secret_is_in_the_image(self, cpu_image: str) -> None:
        found = run_once(
            cpu_image,
            "bash",
            "-c",
            "ls -A /run/secrets /wheels /steps /src 2>/dev/null | grep -v '^$\\|:$'",
            options=["--user", "0:0"],
        )
        assert found.stdout == ""

    @pytest.mark.slow  # the same vLLM and the same check as in `make lint`
    def test_the_recipes_fit_the_installed_vllm(self, cpu_image: str) -> None:
        result = run_once(cpu_image, "nibble", "recipes", "lint")
        assert result.returncode == 0, result.stdout + result.stderr


PLUGIN = """
import nibble_kernels, vllm.plugins
loaded = vllm.plugins.load_plugins_by_group("vllm.general_plugins")
loaded["nibble"]()
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE
print(nibble_kernels.implementations()["cpu"], ModelOptNvFp4FusedMoE.__module__.split(".")[0])
"""


class TestKernels:
    def test_they_are_compiled_and_vllm_loads_their_plugin(self, cpu_image: str) -> None:
        result = run_once(
            cpu_image, "python", "-c", PLUGIN, options=[*HARDENED, "--tmpfs", "/var/cache/nibble"]
        )
        assert result.stdout == "compiled nibble\n", result.stderr

    def test_doctor_finds_them(self, cpu_image: str) -> None:
        report = json.loads(
            run_once(cpu_image, "nibble", "doctor", "--json", options=HARDENED).stdout
        )
        (check,) = (check for check in report["checks"] if check["name"] == "kernels")
        assert check["status"] == "ok", check
        assert "cpu: compiled" in check["what"]

    def test_the_selftest_passes_and_names_a_planted_fault(self, cpu_image: str) -> None:
        """Through the entry point, and without a writable disk."""
        words = ["selftest", "--only", "conversions", "--only", "experts:avx2", "--json"]
        result = run_once(cpu_image, *words, options=HARDENED)
        trials = json.loads(result.stdout)["trials"]
        assert [trial["verdict"] for trial in trials] == ["right", "right"], result.stderr
        result = run_once(cpu_image, *words, "--plant", "conversions=wrong", options=HARDENED)
        assert result.returncode == 8 and "conversions: wrong" in result.stderr


IN_ORDER = {"applied", "not fixed", "fixed upstream", "not needed", "not applicable"}
# Python takes bytecode whose header has the time and size of its source; site-packages cannot be
# written at run time.
STALE_BYTECODE = """
import importlib.util, json, pathlib, struct
folder = pathlib.Path(importlib.util.find_spec("vllm").origin).parent
touched = json.loads((folder / ".nibble-patches" / "record.json").read_text())["after"]
for path in (folder.parent / name for name in touched):
    header = pathlib.Path(importlib.util.cache_from_source(path)).read_bytes()[8:16]
    if struct.unpack("<II", header) != (int(path.stat().st_mtime), path.stat().st_size):
        print(path)
"""


class TestPatches:
    def test_doctor_shows_the_series_and_the_table_of_the_build(self, cpu_image: str) -> None:
        report = json.loads(
            run_once(cpu_image, "nibble", "doctor", "--json", options=HARDENED).stdout
        )
        checks = {check["name"]: check for check in report["checks"]}
        assert checks["patches"]["status"] == "ok", checks["patches"]
        assert checks["probes"]["status"] == "ok", checks["probes"]
        assert {line["probe"] for line in report["patches"]} == set(probe_names())
        assert {line["word"] for line in report["patches"]} <= IN_ORDER

    # a minute; the build ran them in the image, and its table is what the test above reads
    @pytest.mark.slow
    def test_the_probes_pass_in_a_hardened_container(self, cpu_image: str) -> None:
        found = run_once(cpu_image, "nibble", "patches", "status", "--json", options=HARDENED)
        assert found.returncode == 0, found.stderr
        lines = {line["probe"]: line for line in json.loads(found.stdout)}
        assert lines.keys() == set(probe_names())
        assert [line for line in lines.values() if line["word"] not in IN_ORDER] == []
        assert (
            lines["n12_moe_padding"]["word"]
            == lines["n15_exclude_modules_key"]["word"]
            == "applied"
        )

    def test_bytecode_of_patched_files_is_not_stale(self, cpu_image: str) -> None:
        found = run_once(cpu_image, "python", "-c", STALE_BYTECODE, options=HARDENED)
        assert (found.returncode, found.stdout) == (0, "")

    def test_the_checks_of_the_build_leave_nothing_behind(self, cpu_image: str) -> None:
        """Least of all root's folders in the cache volume, which a user could not write to."""
        left = run_once(cpu_image, "find", "/tmp", "/var/cache/nibble", "-mindepth", "1")
        assert (left.returncode, left.stdout) == (0, "/var/cache/nibble/home\n")


@pytest.mark.slow
def test_an_image_without_a_patch_that_a_probe_wants_is_not_built(
    cpu_image: str, build_environ: dict[str, str], tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    listed = [
        "git",
        "-C",
        str(root()),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    for name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split(
        "\0"
    ):
        if name and (root() / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root() / name, checkout / name)
    series = checkout / "patches" / "vllm" / "series"
    series.write_text(series.read_text().replace("moe-gated-padding.patch\n", ""))
    (series.parent / "moe-gated-padding.patch").unlink()
    environ = build_environ | {"IMAGE": "nibble-test-without"}
    result = subprocess.run(
        [checkout / "build.sh", "cpu"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert result.returncode != 0
    assert "nibble: error: N12 needed in /opt/venv/" in result.stdout + result.stderr
