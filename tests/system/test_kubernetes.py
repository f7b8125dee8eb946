"""Pods of `nibble cluster manifest` under Podman 5.4's `kube play`; kubectl builds the bases.

No package here has an API server or a kubelet. Podman runs a Pod's containers, volumes, secrets,
security and liveness as written; what it lacks is put in by `pod`: a pod's own address in its
variables, and the second rank.
"""

from __future__ import annotations

import base64
import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from nibble.cli.manifest_options import PodOptions, with_options
from nibble.cli.manifests import carried, manifest, words_for
from nibble.plan.gather import plan_for, read_wishes
from tests.support.debian import unpacked
from tests.support.docker.images import CACHE
from tests.support.paths import ROOT
from tests.support.system.machine import Machine
from tests.support.system.podman_machine import SLOW_MODEL, podman_machine

pytestmark = pytest.mark.docker
IMAGE = "localhost/nibble:cpu"
KEY = "kubernetes-test-key-0123456789"
CACHE_FOLDER = "/srv/nibble"
READY_S = 300
TOKENS = 600


@pytest.fixture(scope="module")
def kubectl() -> Path:
    return unpacked("kubectl-trixie", "trixie", ("kubectl",)) / "usr/bin/kubectl"


@pytest.mark.parametrize("kind", ["lws", "kuberay"])
def test_kubectl_builds_the_base_with_a_users_patch(
    kubectl: Path, kind: str, tmp_path: Path
) -> None:
    """As a user would change the common part: with a Kustomization on top of it."""
    base = ROOT / "docker/kubernetes" / kind
    (tmp_path / "base").symlink_to(base)
    found = yaml.safe_load((base / _resource(base)).read_text())
    target = {"kind": found["kind"], "name": "nibble"}
    patch = [{"op": "replace", "path": "/metadata/name", "value": "mine"}]
    text = {"resources": ["base"], "patches": [{"target": target, "patch": json.dumps(patch)}]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(text))
    words = [kubectl, "kustomize", "--load-restrictor", "LoadRestrictionsNone", tmp_path]
    built = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout
    assert yaml.safe_load(built) == found | {"metadata": found["metadata"] | {"name": "mine"}}


def _resource(base: Path) -> str:
    (name,) = yaml.safe_load((base / "kustomization.yaml").read_text())["resources"]
    return name


def pod(name: str, options: PodOptions, model: str, **environ: str) -> str:
    """The leader's pod of a LeaderWorkerSet as a Pod, with its Secret, for Podman.

    It is one rank of one: without the operator there is no second pod.
    """
    given = {"HEAD_IP": "head", "NIBBLE_NNODES": "2", "NUM_GPUS": "1", **environ}
    asked = read_wishes([model, "--tensor-parallel-size", "2", "--target", "cpu"], given)
    made = manifest("lws", plan_for(asked), words_for(asked.command), IMAGE, carried(asked, given))
    template = with_options(made, options)["spec"]["leaderWorkerTemplate"]
    spec = json.loads(json.dumps(template["leaderTemplate"]["spec"]))
    (serve,) = spec["containers"]
    alone = {"POD_IP": "127.0.0.1", "WORKER_IP": "127.0.0.1", "NIBBLE_NNODES": "1"}
    alone |= {"TENSOR_PARALLEL_SIZE": "1"}
    kept = [one for one in serve["env"] if one["name"] not in alone]
    serve["env"] = [*kept, *({"name": key, "value": value} for key, value in alone.items())]
    serve["command"][2] = serve["command"][2].replace("size=2", "size=1")
    serve["ports"][0]["hostPort"] = 8000
    values = {"api-key": KEY, "cluster-token": "0123456789abcdef" * 4}
    secret = {
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "nibble"},
        "data": {key: base64.b64encode(text.encode()).decode() for key, text in values.items()},
    }  # fmt: skip
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    return yaml.safe_dump_all([secret, document])


@dataclass
class Cluster:
    """A machine with Podman, and the port of its pods as this host sees it."""

    machine: Machine
    port: int

    def play(self, text: str) -> None:
        self.machine.write("/srv/pod.yaml", text)
        self.machine.run("podman", "kube", "play", "/srv/pod.yaml")

    def delete(self, graceful: str = "") -> None:
        """`graceful` is a pod whose container first has its grace, as a kubelet gives it: it keeps
        the pod's network until then.
        """
        if graceful:
            self.machine.run("podman", "stop", f"{graceful}-serve", timeout=120)
        self.machine.run("podman", "kube", "down", "/srv/pod.yaml", timeout=120)

    def container(self, name: str) -> dict[str, Any]:
        return json.loads(self.machine.run("podman", "inspect", f"{name}-serve"))[0]

    def probe(self, name: str, probe: str, text: str) -> int:
        """The exit status of a probe's command, as a kubelet would run it."""
        spec = list(yaml.safe_load_all(text))[1]["spec"]["containers"][0]
        command = spec[probe]["exec"]["command"]
        return self.machine.ask("podman", "exec", f"{name}-serve", *command).returncode

    def wait_ready(self, name: str, text: str) -> None:
        """Once it lives it lives on, while it loads."""
        deadline, alive = time.monotonic() + READY_S, False
        while self.probe(name, "readinessProbe", text):
            logs = self.machine.ask("podman", "logs", f"{name}-serve")
            said = (logs.stdout + logs.stderr)[-4000:]
            assert time.monotonic() < deadline, said
            assert self.container(name)["State"]["Running"], said
            lives = self.probe(name, "livenessProbe", text) == 0
            assert lives or not alive, said
            alive = lives
            time.sleep(1)
        assert alive

    def open(self, payload: Any, key: str = KEY) -> Any:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(payload).encode(), headers)
        return urllib.request.urlopen(request, timeout=120)


@pytest.fixture(scope="module")
def cluster(cpu_image: str) -> Iterator[Cluster]:
    pause = "apt-get update -q && apt-get install -qy --no-install-recommends catatonit"
    with podman_machine("kube", pause) as made:
        made.give(cpu_image, IMAGE, "2026-01-01T00:00:00Z")
        made.machine.run("install", "-d", "-o", "2000", "-g", "0", "-m", "0770", CACHE_FOLDER)
        yield Cluster(made.machine, made.port)


QUIET = {"NIBBLE_CANARY": "off", "VLLM_EXTRA_ARGS": "--enforce-eager"}


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> tuple[str, str]:
    """A pod that serves a slow model of random weights from a folder of the node."""
    options = PodOptions(shm="1Gi", cache=CACHE_FOLDER)
    text = with_folder(pod("slow", options, str(CACHE / "slow-model"), **QUIET))
    cluster.play(text)
    cluster.wait_ready("slow", text)
    return "slow", text


def with_folder(text: str) -> str:
    """The model of the plan's folder is at SLOW_MODEL on the node and in the pod."""
    secret, document = yaml.safe_load_all(text.replace(str(CACHE / "slow-model"), SLOW_MODEL))
    spec = document["spec"]
    spec["volumes"].append({"name": "slow", "hostPath": {"path": SLOW_MODEL}})
    mount = {"name": "slow", "mountPath": SLOW_MODEL, "readOnly": True}
    spec["containers"][0]["volumeMounts"].append(mount)
    return yaml.safe_dump_all([secret, document])


def test_a_pod_serves_with_the_secrets_key(cluster: Cluster, served: tuple[str, str]) -> None:
    payload = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}
    payload |= {"max_tokens": 2}
    with cluster.open(payload) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 2
    with pytest.raises(urllib.error.HTTPError) as refused:
        cluster.open(payload, "another")
    assert refused.value.code == 401


def test_a_pod_is_hardened_with_shared_memory_and_a_cache_that_stays(
    cluster: Cluster, served: tuple[str, str]
) -> None:
    name = f"{served[0]}-serve"
    asked = "id -u; touch /opt/x 2>&1 || true; df -m /dev/shm | tail -1; grep CapEff /proc/1/status"
    said = cluster.machine.run("podman", "exec", name, "sh", "-c", asked).splitlines()
    assert said[0] == "2000" and "Read-only file system" in said[1]
    # Podman takes a volume in memory, without its limit; a container's own has 64 MiB.
    assert said[2].split()[0] == "tmpfs" and int(said[2].split()[1]) > 64
    assert int(said[3].split()[1], 16) == 0
    assert cluster.container(served[0])["Config"]["StopTimeout"] == 60
    assert cluster.machine.run("ls", CACHE_FOLDER)


def test_probes_follow_the_server(cluster: Cluster, served: tuple[str, str]) -> None:
    name, text = served
    assert cluster.probe(name, "readinessProbe", text) == 0
    assert cluster.probe(name, "livenessProbe", text) == 0
    assert "live" in json.dumps(cluster.container(name)["Config"]["Healthcheck"]["Test"])
    cluster.machine.run("podman", "healthcheck", "run", f"{name}-serve")


def test_deleting_a_pod_lets_an_answer_finish(cluster: Cluster, served: tuple[str, str]) -> None:
    payload = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}
    payload |= {"ignore_eos": True, "max_tokens": TOKENS, "stream": True}
    payload |= {"stream_options": {"include_usage": True}}
    going = threading.Thread(target=cluster.delete, args=[served[0]])
    chunks: list[dict[str, Any]] = []
    with cluster.open(payload) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                chunks.append(json.loads(line[6:]))
                if len(chunks) == 20:
                    going.start()
    going.join(90)
    assert chunks[-1]["usage"]["completion_tokens"] == TOKENS
    listed = cluster.machine.run("podman", "ps", "--all", "--quiet", "--filter", "name=slow-serve")
    assert listed == ""
    assert cluster.machine.run("ls", CACHE_FOLDER)


def test_a_pod_for_rdma_may_pin_memory_and_no_more(cluster: Cluster) -> None:
    """Its process has the one capability in effect, which user 2000 would not."""
    text = pod("rdma", PodOptions(rdma="rdma/hca=1"), "nibble-demo-nvfp4")
    secret, document = yaml.safe_load_all(text)
    container = document["spec"]["containers"][0]
    container["resources"] = {}  # no device plugin here
    container["command"] = ["sleep", "600"]
    del container["livenessProbe"]
    cluster.play(yaml.safe_dump_all([secret, document]))
    try:
        said = cluster.machine.run("podman", "exec", "rdma-serve", "grep", "Cap", "/proc/1/status")
        sets = dict(line.split(":\t") for line in said.splitlines())
        assert {int(sets[one], 16) for one in ("CapEff", "CapPrm", "CapBnd")} == {1 << 14}
        planned = cluster.machine.ask(
            "podman", "exec", "rdma-serve", "nibble", "plan", "nibble-demo-nvfp4"
        )
        assert planned.returncode == 0, planned.stderr
    finally:
        cluster.delete()
