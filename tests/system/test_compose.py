"""docker/compose.yaml under Compose: health, secrets, drain, restarts, upgrade and profiles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import prometheus
from tests.support.cluster.cluster_nodes import DEMO, SMALL, SUBNET, network
from tests.support.docker import images
from tests.support.docker.compose import CLUSTER_TOKEN, Project, project
from tests.support.docker.containers import Answer, Container, client, docker, hub_cache
from tests.support.docker.served_containers import KEY, chat, trouble
from tests.support.models import slow_model
from tests.support.paths import CLUSTER_PLATFORM

pytestmark = pytest.mark.docker
READY_S = "300"
QUESTION = "What is NVFP4?"
TOKENS = 300
UPGRADED = "nibble-compose-test:cpu-next"


def answers(container: Container) -> bool:
    """Whether it answers as the demo does."""
    return "4" in chat(container, KEY, QUESTION).json()["choices"][0]["message"]["content"]


def engine_of(container: Container) -> int:
    """The process number, on this machine, of vLLM's engine in a container."""
    listed = docker("top", container.id, "-eo", "pid,args").stdout.splitlines()
    (found,) = [line for line in listed if "VLLM::EngineCore" in line]
    return int(found.split()[0])


@pytest.fixture(scope="module")
def served(cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    folder, name = tmp_path_factory.mktemp("compose"), f"nibble-compose-{os.getpid()}"
    environ = {"MODEL": "nibble-demo-nvfp4", "MAX_NUM_SEQS": "4", "SERVED_MODEL_NAME": "of-a-guide"}
    with project(folder / "project", name, cpu_image, **environ) as made:
        made.run("up", "--detach", "--wait", "--wait-timeout", READY_S)
        yield made


def test_up_waits_until_it_serves_with_the_secrets_key_and_the_shells_variables(
    served: Project,
) -> None:
    container = served.container()
    assert container.health() == "healthy"
    assert answers(container)
    assert chat(container, None, QUESTION).status == 401
    models = container.request("/v1/models", key=KEY).json()["data"]
    assert models[0]["id"] == "of-a-guide"
    assert container.exec("printenv", "MAX_NUM_SEQS").stdout == "4\n"
    assert not trouble(container.logs())


def test_the_key_is_in_a_file_and_nowhere_else(served: Project) -> None:
    container = served.container()
    assert KEY not in json.dumps(container.inspect()) and KEY not in container.logs()
    assert container.exec("cat", "/run/secrets/api_key").stdout == KEY


def test_the_container_is_hardened(served: Project) -> None:
    container = served.container()
    host = container.inspect()["HostConfig"]
    assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["Privileged"]
    assert container.exec("touch", "/opt/nibble/x").returncode != 0
    assert container.exec("id", "-u").stdout.strip() == "2000"


def test_a_killed_engine_is_restarted_and_serves_again(served: Project) -> None:
    container = served.container()
    os.kill(engine_of(container), signal.SIGKILL)
    wait_until(lambda: container.inspect()["RestartCount"] == 1, 60, container)
    assert "nibble: error: vLLM ended by itself" in container.logs()
    container.wait_healthy(300)
    assert answers(container)


def test_an_upgrade_by_tag_keeps_the_volume_and_goes_back(served: Project) -> None:
    container = served.container()
    old = container.inspect()["Image"]
    container.exec("touch", "/var/cache/nibble/of-the-first-image")
    made = f"FROM {docker('inspect', '-f', '{{.Config.Image}}', container.id).stdout}LABEL next=1\n"
    subprocess.run(
        [client() or "docker", "build", "--quiet", "--tag", UPGRADED, "-"],
        input=made, text=True, check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    try:
        repository, _, tag = UPGRADED.rpartition(":")
        served.run("up", "-d", "--wait", "--wait-timeout", READY_S, IMAGE=repository, TAG=tag)
        upgraded = served.container()
        assert upgraded.id != container.id and upgraded.inspect()["Image"] != old
        assert upgraded.exec("test", "-e", "/var/cache/nibble/of-the-first-image").returncode == 0
        assert answers(upgraded)
        served.run("up", "-d", "--wait", "--wait-timeout", READY_S)
        assert served.container().inspect()["Image"] == old
    finally:
        served.run("down", check=False)
        docker("rmi", "--force", UPGRADED, check=False)


@pytest.fixture(scope="module")
def slow_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face cache with a model that is still streaming when `down` comes."""
    model = slow_model.make_slow_model(images.CACHE / "slow-model")
    return hub_cache(tmp_path_factory.mktemp("hf") / "huggingface", model, "test/slow")


def test_down_lets_a_streaming_answer_finish_and_keeps_the_volume(
    cpu_image: str, slow_cache: Path, tmp_path: Path
) -> None:
    name = f"nibble-compose-drain-{os.getpid()}"
    with project(tmp_path / "project", name, cpu_image, MODEL="test/slow") as made:
        # Random weights: the canary's questions have no right answer here.
        environment = "{NIBBLE_CANARY: 'off', VLLM_EXTRA_ARGS: --enforce-eager}"
        volumes = f"['{slow_cache}:/root/.cache/huggingface:ro']"
        service = f"services: {{cpu: {{environment: {environment}, volumes: {volumes}}}}}\n"
        made.override("slow.yaml", service)
        made.run("up", "-d", "--wait", "--wait-timeout", READY_S)
        container = made.container()
        ended = subprocess.Popen(
            [client() or "docker", "wait", container.id], stdout=subprocess.PIPE, text=True
        )
        chunks, late = _stream_while_going_down(container, made)
        assert chunks[-1]["usage"]["completion_tokens"] == TOKENS
        assert [one["choices"][0]["finish_reason"] for one in chunks if one["choices"]][
            -1
        ] == "length"
        assert late.status == 503
        assert int(ended.communicate(timeout=60)[0]) == 0
        volumes_left = docker("volume", "ls", "--quiet", "--filter", f"name={name}_cache").stdout
        assert volumes_left.strip() == f"{name}_cache"


def _stream_while_going_down(container: Container, made: Project) -> tuple[list[dict], Answer]:
    """The chunks of an answer that `down` overtakes, and the answer to a later request."""
    payload = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}
    payload |= {"ignore_eos": True, "max_tokens": TOKENS, "stream_options": {"include_usage": True}}
    chunks: list[dict] = []
    late: list[Answer] = []
    going = threading.Thread(target=made.run, args=("down",))
    for chunk in container.stream(payload, KEY):
        chunks.append(chunk)
        if len(chunks) == 20:
            going.start()
        if len(chunks) == 80:
            late.append(chat(container, KEY, "too late", max_tokens=2))
    going.join(90)
    return chunks, late[0]


def test_a_refused_start_ends_after_five_restarts(cpu_image: str, tmp_path: Path) -> None:
    name = f"nibble-compose-refused-{os.getpid()}"
    with project(tmp_path / "project", name, cpu_image, MODEL="/nowhere") as made:
        made.run("up", "-d")
        container = made.container()
        wait_until(lambda: container.inspect()["State"]["Status"] == "exited", 120, container)
        told = container.inspect()
        assert (told["RestartCount"], told["State"]["ExitCode"]) == (5, 4)
        assert container.logs().count("nibble: error:") == 6


def test_a_crash_loop_ends_in_75_and_stays_down(cpu_image: str, tmp_path: Path) -> None:
    """The record of one killed start is made six long: the test does not wait for the pauses."""
    name = f"nibble-compose-crash-{os.getpid()}"
    with project(tmp_path / "project", name, cpu_image, MODEL="nibble-demo-nvfp4") as made:
        made.run("up", "-d")
        container = made.container()
        container.wait_for(lambda: bool(api_servers(container)), 60, "vLLM's start")
        os.kill(api_servers(container)[0], signal.SIGKILL)
        wait_until(lambda: container.inspect()["RestartCount"] == 1, 60, container)
        made.run("stop")
        place = ("volume", "inspect", f"{name}_cache", "--format", "{{.Mountpoint}}")
        (record,) = (Path(docker(*place).stdout.strip()) / "crash-loop").glob("*.json")
        kept = json.loads(record.read_text())
        (failure,) = kept["failures"]
        times = [time.time() - 60 * back for back in reversed(range(6))]
        record.write_text(json.dumps(kept | {"failures": [failure | {"at_s": t} for t in times]}))
        made.run("up", "-d")
        wait_until(lambda: container.inspect()["State"]["Status"] == "exited", 120, container)
        told = container.inspect()
        assert (told["RestartCount"], told["State"]["ExitCode"]) == (5, 75)
        assert "6 starts in a row failed" in container.logs()


def api_servers(container: Container) -> list[int]:
    """Process numbers, on this machine, of vLLM's API server in a container."""
    listed = docker("top", container.id, "-eo", "pid,args", check=False).stdout.splitlines()
    return [int(line.split()[0]) for line in listed if "nibble.engine.start_vllm" in line]


def wait_until(is_so: Callable[[], bool], seconds: float, container: Container) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, container.logs()[-4000:]
        time.sleep(0.5)


PROMETHEUS = """
FROM {base}
COPY prometheus /bin/prometheus
RUN install -d -o 65534 -g 65534 /prometheus
WORKDIR /prometheus
ENTRYPOINT ["/bin/prometheus"]
"""


def test_the_profile_metrics_scrapes_with_the_secrets_key(
    cpu_image: str, base_image: str, tmp_path: Path
) -> None:
    """Debian's Prometheus in an image made like the published one, which no registry here has."""
    program = prometheus.programs() / "prometheus"
    (tmp_path / "image").mkdir()
    (tmp_path / "image/prometheus").write_bytes(program.read_bytes())
    (tmp_path / "image/prometheus").chmod(0o755)
    (tmp_path / "image/Dockerfile").write_text(PROMETHEUS.format(base=base_image))
    name = f"nibble-compose-metrics-{os.getpid()}"
    image = f"{name}:prometheus"
    docker("build", "--quiet", "--tag", image, str(tmp_path / "image"))
    environ = {"PROMETHEUS_IMAGE": image, "PROMETHEUS_PORT": "0", "MODEL": "nibble-demo-nvfp4"}
    try:
        with project(tmp_path / "project", name, cpu_image, **environ) as made:
            made.profiles = ("cpu", "metrics")
            made.run("up", "-d", "--wait", "--wait-timeout", READY_S, "cpu", "prometheus")
            _must_be_scraped(made)
            groups = _ask(made, "/api/v1/rules")["groups"]
            assert groups and all(rule["health"] != "err" for rule in groups[0]["rules"])
            made.run("down", "--volumes")
    finally:
        docker("rmi", "--force", image, check=False)


def _ask(made: Project, path: str) -> dict:
    port = docker("port", made.container("prometheus").id, "9090/tcp").stdout.split()[0]
    with urllib.request.urlopen(f"http://{port}{path}", timeout=10) as answer:
        return json.load(answer)["data"]


def _must_be_scraped(made: Project) -> None:
    deadline = time.monotonic() + 60
    while True:
        targets = _ask(made, "/api/v1/targets")["activeTargets"]
        if targets and targets[0]["health"] == "up":
            break
        assert time.monotonic() < deadline, targets
        time.sleep(1)
    (found,) = _ask(made, "/api/v1/query?query=nibble_ready")["result"]
    assert found["value"][1] == "1"


CLUSTER = """
services:
  cluster:
    network_mode: !reset null
    deploy: !reset null
    ulimits: !reset null
    shm_size: 1gb
    networks: {{cluster: {{ipv4_address: {address}}}}}
    volumes: ["{plugin}:/plugin:ro"]
    environment: {environment}
networks: {{cluster: {{external: true, name: {network}}}}}
"""


def test_the_profile_cluster_serves_one_model_on_two_nodes(cpu_image: str, tmp_path: Path) -> None:
    """Two projects as two machines: on a private network in place of the machines' own."""
    head = f"{SUBNET}.11"
    words = {"HEAD_IP": head, "NIBBLE_NNODES": "2", "TENSOR_PARALLEL_SIZE": "2", "MODEL": DEMO}
    words |= {"MAX_MODEL_LEN": "1024"}
    environment = json.dumps({k: v for k, v in SMALL.items() if k != "NIBBLE_ALLOW_ANONYMOUS"})
    with network() as net:
        names = [f"nibble-compose-node{rank}-{os.getpid()}" for rank in (0, 1)]
        folders = [tmp_path / name for name in names]
        rank0 = project(folders[0], names[0], cpu_image, **words, NIBBLE_NODE_RANK="0", PORT="8000")
        rank1 = project(folders[1], names[1], cpu_image, **words, NIBBLE_NODE_RANK="1", PORT="8000")
        with rank0 as first, rank1 as second:
            for made, address in ((first, head), (second, f"{SUBNET}.12")):
                made.profiles = ("cluster",)
                made.override(
                    "private.yaml",
                    CLUSTER.format(
                        address=address,
                        plugin=CLUSTER_PLATFORM,
                        environment=environment,
                        network=net,
                    ),
                )
                made.run("up", "-d")
            container = first.container("cluster")
            container.wait_healthy(300)
            code = (
                "import json, urllib.request as u; print(u.urlopen(u.Request("
                "'http://127.0.0.1:8000/v1/completions', json.dumps({'model': 'default',"
                " 'prompt': 'What is NVFP4?', 'max_tokens': 8}).encode(), {'content-type':"
                f" 'application/json', 'authorization': 'Bearer {KEY}'"
                "})).read().decode())"
            )
            answer = container.exec("python", "-c", code)
            assert answer.returncode == 0 and json.loads(answer.stdout)["choices"]
            assert "2 nodes are compatible" in container.logs()
            assert CLUSTER_TOKEN not in container.logs()
            first.run("down", "--volumes")
            second.run("down", "--volumes")
