"""Every docker command that README and docs print, run as printed but for names, ports and what
needs a GPU.
"""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from nibble.cli.container_commands import cpu_commands
from nibble.hub.packaged import DEFAULT_MODEL
from nibble.plan.shared_memory import VARIABLE
from nibble.serve.ready_message import QUESTION
from tests.support.changes import CONTAINERS
from tests.support.docker.containers import Container, client, docker, run_once, running, volume
from tests.support.docker.documented import Documented, documented
from tests.support.docker.served_containers import chat, trouble

pytestmark = pytest.mark.docker

(README_SERVER,) = [one for one in documented("docker run") if one.serves and one.target == "cpu"]
FOR_GPUS = [one for one in documented("docker run") if one.needs_gpu]
OTHERS = [
    one
    for one in documented("docker run")
    if not one.serves and not one.needs_gpu and "ray_auth_token" not in one.command
]
TO_HEAD, TO_OTHER_NODE = (one for one in documented("docker ") if "ray_auth_token" in one.command)
(ASK,) = [one for one in documented("docker exec") if "chat" in one.command]
DOCKERS_SHM_BYTES = 64 << 20


def shell(command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A printed command in a shell, with the tests' Docker client."""
    line = f"{client() or 'docker'} {command.removeprefix('docker ')}"
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def name() -> str:
    return f"nibble-test-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="module")
def used_volume(cpu_image: str) -> Iterator[str]:
    """A cache volume in which another user's server has made its key and its folders, and was
    killed.
    """
    with volume() as cache:
        options = ["--user", "12345:0", "--volume", f"{cache}:/var/cache/nibble"]
        with running(cpu_image, "serve", "nibble-demo-nvfp4", options=options) as before:
            before.wait_for(lambda: "[nibble] start" in before.logs(), 60, "started")
            docker("kill", before.id)
        yield cache


@pytest.fixture(scope="module")
def server(cpu_image: str, used_volume: str) -> Iterator[Container]:
    """README's server: user 2000:0, Docker's own shared memory, and the key that its volume's
    first user generated.
    """
    given = name()
    command = README_SERVER.with_(cpu_image, used_volume, given)
    started = shell(command.replace("docker run --rm", "docker run --detach"))
    assert started.returncode == 0, started.stderr
    container = Container(given)
    try:
        assert container.health() == "starting"
        container.wait_healthy()
        yield container
    finally:
        docker("rm", "--force", given)


@pytest.fixture(scope="module")
def key(server: Container) -> str:
    found = server.exec("cat", "/var/cache/nibble/api_key")
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


class TestServing:
    def test_health_goes_from_starting_to_healthy(self, server: Container) -> None:
        assert server.health() == "healthy"  # `starting` was seen by the fixture

    def test_it_runs_as_2000_0_without_any_privilege(self, server: Container) -> None:
        assert server.exec("id", "-u").stdout.strip() == "2000"
        assert server.exec("id", "-g").stdout.strip() == "0"
        assert server.exec("touch", "/opt/nibble/x").returncode != 0

    def test_a_request_without_key_is_401(self, server: Container, key: str) -> None:
        assert chat(server, None, "What is NVFP4?").status == 401
        assert server.request("/metrics").status == 401
        assert server.request("/health").status == 200
        assert chat(server, key + "x", "What is NVFP4?").status == 401

    def test_the_generated_key_is_its_first_users_readable_for_group_0_and_not_in_the_log(
        self, server: Container, key: str
    ) -> None:
        files = server.exec(
            "find", "/var/cache/nibble", "-name", "*key*", "-type", "f", "-printf", "%m %U:%G\n"
        ).stdout.split()
        assert files == ["640", "12345:0"]
        assert len(key) >= 24
        assert key not in server.logs()
        assert (
            key
            not in server.exec(
                "bash", "-c", "tr '\\0' ' ' < /proc/1/cmdline; cat /proc/[0-9]*/cmdline"
            ).stdout
        )

    def test_the_default_model_answers_a_question(self, server: Container, key: str) -> None:
        answer = chat(server, key, QUESTION)
        assert answer.status == 200, answer.body
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == "The capital of France is Paris."

    def test_the_default_model_came_with_the_image(self, server: Container) -> None:
        assert "[nibble] fetching" not in server.logs()
        plan = json.loads(server.exec("nibble", "plan", "--json").stdout)
        assert plan["command"][2] == f"/opt/nibble/models/{DEFAULT_MODEL}"


class TestReadmesServer:
    def test_readme_prints_what_is_declared(self) -> None:
        assert README_SERVER.page == "README.md"
        assert README_SERVER.command == cpu_commands()[1].replace(" \\\n ", "")

    def test_it_has_dockers_own_shared_memory_and_needs_no_queue(
        self, server: Container, key: str
    ) -> None:
        assert server.inspect()["HostConfig"]["ShmSize"] == DOCKERS_SHM_BYTES
        used = "import shutil; print(shutil.disk_usage('/dev/shm').used)"
        assert int(server.exec("python", "-c", used).stdout) < DOCKERS_SHM_BYTES // 2
        plan = json.loads(server.exec("nibble", "plan", "nibble-demo-nvfp4", "--json").stdout)
        assert VARIABLE not in plan["env"]  # engine and worker are one process

    def test_the_question_that_readme_asks_is_answered(self, server: Container) -> None:
        answered = shell(ASK.with_("", "", server.id))
        assert answered.returncode == 0, answered.stderr
        assert answered.stdout == "The capital of France is Paris.\n"

    def test_docker_stop_of_an_idle_server_is_exit_0_and_the_log_is_clean(
        self, server: Container
    ) -> None:
        docker("stop", "--time", "60", server.id)
        assert server.exit_code() == 0
        assert trouble(server.logs()) == ""


@pytest.mark.parametrize("command", FOR_GPUS, ids=str)
def test_a_command_for_gpus_reads_its_line_and_asks_for_a_gpu(
    cpu_image: str, command: Documented
) -> None:
    """The image says that it is for a GPU; Docker, the entry point and nibble have then read
    every word.
    """
    with volume() as cache:
        done = shell(command.with_(cpu_image, cache, name()))
    assert done.returncode == 3, done.stdout + done.stderr
    assert f"this image is for {command.target} and the machine has no GPU" in done.stderr
    assert "--gpus all" in done.stderr


@pytest.mark.parametrize("command", OTHERS, ids=str)
def test_every_other_line_does_what_it_says(
    cpu_image: str, used_volume: str, command: Documented
) -> None:
    done = shell(command.with_(cpu_image, used_volume, name()))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_volume_of_another_group_is_usable_after_the_printed_command(cpu_image: str) -> None:
    (give_away,) = [one for one in OTHERS if "chown" in one.command]
    with volume() as cache:
        mount = ["--volume", f"{cache}:/var/cache/nibble"]
        spoil = (
            "mkdir /var/cache/nibble/engine && chown -R 777:777 /var/cache/nibble && chmod -R"
            " g-s,go-w /var/cache/nibble"
        )
        assert (
            run_once(cpu_image, "bash", "-c", spoil, options=[*mount, "--user", "0:0"]).returncode
            == 0
        )
        refused = run_once(cpu_image, "serve", "nibble-demo-nvfp4", options=mount)
        assert refused.returncode == 5, refused.stderr
        assert "cannot write to /var/cache/nibble (Permission denied)" in refused.stderr
        assert shell(give_away.with_(cpu_image, cache, name())).returncode == 0
        write = "touch /var/cache/nibble/engine/file"
        assert run_once(cpu_image, "bash", "-c", write, options=mount).returncode == 0


@pytest.mark.when_changed(*CONTAINERS)
class TestClusterToken:
    def test_the_printed_commands_bring_it_to_another_node(
        self, cpu_image: str, tmp_path: Path
    ) -> None:
        with volume() as heads, volume() as others:
            mount = ["--volume", f"{heads}:/var/cache/nibble"]
            with running(cpu_image, "ray-head", options=mount) as head:
                head.wait_for(lambda: "Ray head is up" in head.logs(), 120, "up")
                assert shell(TO_HEAD.with_(cpu_image, heads, head.id), tmp_path).returncode == 0
                stored = shell(TO_OTHER_NODE.with_(cpu_image, others, name()), tmp_path)
                assert stored.returncode == 0, stored.stderr
                address = head.inspect()["NetworkSettings"]["IPAddress"]
                options = ["--env", f"HEAD_IP={address}", "--volume", f"{others}:/var/cache/nibble"]
                asked = run_once(cpu_image, "cluster", "status", options=options)
                assert asked.returncode == 0, asked.stderr
                assert "ray-head" in asked.stdout

    def test_a_file_of_root_is_refused_with_the_command_that_opens_it(
        self, cpu_image: str, tmp_path: Path
    ) -> None:
        """As `docker cp` brings it: owner root, mode 0600."""
        token = tmp_path / "ray_auth_token"
        token.write_text("0123456789abcdef" * 4 + "\n")
        token.chmod(0o600)
        options = ["--volume", f"{token}:/run/token:ro", "--env", "RAY_AUTH_TOKEN_FILE=/run/token"]
        refused = run_once(
            cpu_image, "ray-worker", options=[*options, "--env", "HEAD_IP=127.0.0.1"]
        )
        assert refused.returncode == 5
        assert "run `chgrp 0 /run/token && chmod g+r /run/token` as root" in refused.stderr
        assert refused.stderr.count("\n") == 1
        subprocess.run(["bash", "-c", f"chgrp 0 {token} && chmod g+r {token}"], check=True)
        reached = run_once(
            cpu_image, "ray-worker", options=[*options, "--env", "HEAD_IP=127.0.0.1"]
        )
        assert reached.returncode == 9, "the token is read, and no head answers"


def test_a_read_only_container_without_a_volume_is_told_to_mount_one(cpu_image: str) -> None:
    refused = run_once(
        cpu_image, "serve", "nibble-demo-nvfp4", options=["--read-only", "--tmpfs", "/tmp:exec"]
    )
    assert refused.returncode == 5, refused.stderr
    said = refused.stderr.splitlines()[-1]
    assert "docker run --volume nibble-cache:/var/cache/nibble" in said and "chown" not in said
    served = [
        "--read-only",
        "--tmpfs",
        "/tmp:exec",
        "--tmpfs",
        "/var/cache/nibble:exec",
        "--env",
        "PORT=no",
    ]
    assert "PORT" in run_once(cpu_image, "serve", "nibble-demo-nvfp4", options=served).stderr


def test_too_little_shared_memory_is_refused_before_the_load_with_the_option(
    cpu_image: str,
) -> None:
    two = ["--env", "TENSOR_PARALLEL_SIZE=2"]
    refused = run_once(cpu_image, "serve", "nibble-demo-nvfp4", options=two)
    assert refused.returncode == 7, refused.stderr
    assert "/dev/shm has 64 MiB free, but vLLM needs 496 MiB there for 2 workers" in refused.stderr
    assert "--shm-size 1g or --ipc host" in refused.stderr
    assert "[nibble] start" not in refused.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--version"], 0, "nibble 0."),
        (["--help"], 0, "ray-head"),
        (["inspect", "nibble-demo-nvfp4"], 0, "loads exactly"),
        (["status"], 10, "docker exec CONTAINER nibble status"),
        (["ray-head", "extra"], 2, "takes no model, but the command line has 'extra'"),
        (["sttaus"], 127, "neither a verb of nibble nor a program; expected serve, stop,"),
    ],
)
def test_a_verb_is_the_first_word(cpu_image: str, words: list[str], code: int, said: str) -> None:
    done = run_once(cpu_image, *words)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
