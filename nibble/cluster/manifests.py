"""Kubernetes manifests from a plan: a KubeRay RayCluster, or a LeaderWorkerSet for vLLM's own way. Pure.

JSON, which kubectl reads as it does YAML. The pods run nibble's own modes, so that gate, canary, watchdog, token and the fixed
ports are those of every other installation.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, Literal

from nibble.cluster.ports import AGENT_PORT, GCS_PORT
from nibble.errors import ExitCode, NibbleError
from nibble.plan import Plan
from nibble.settings import options
from nibble.settings_layers import Loaded

Kind = Literal["kuberay", "lws"]
RAY_VERSION = "2.60.0"  # requirements/cuda.lock
# The image's own ENTRYPOINT: a process 1 that hands signals on and collects what ended.
ENTRY = "tini -- /opt/nibble/docker/start.sh"
# Made by the user: kubectl create secret generic nibble --from-file=api-key --from-file=cluster-token, and hf-token where the
# model needs one.
SECRET = "nibble"
RAY_TOKEN_KEY = (
    "auth_token"  # in the Secret that KubeRay makes and names after the cluster (kuberay utils/constant.go)
)
# Not for the pods: what each gets from its place, from its image, or for this machine only.
_OF_THIS_MACHINE = frozenset(
    (
        "cache_dir",
        "cluster",
        "config",
        "head_ip",
        "host",
        "nnodes",
        "node_rank",
        "num_gpus",
        "target",
        "worker_ip",
    )
)
_DRAIN_MARGIN_S = 30


def read_kind(word: str) -> Kind:
    """`word` as a kind. Raises USAGE."""
    if word not in ("kuberay", "lws"):
        raise NibbleError(
            ExitCode.USAGE, f"there is no manifest {word!r}", "kuberay or lws", "correct the word"
        )
    return "kuberay" if word == "kuberay" else "lws"


def carried(loaded: Loaded, environ: Mapping[str, str]) -> dict[str, str]:
    """The settings that were given here as variables and that the pods need too: name -> value, no secrets.

    Raises CONFIG where some are in a file, which the pods would not have.
    """
    if loaded.settings.config:
        what = f"the settings file {loaded.settings.config} would not be in the pods"
        raise NibbleError(ExitCode.CONFIG, what, "variables or flags", "unset NIBBLE_CONFIG and give them so")
    given = {field: origin.name for field, origin in loaded.origins.items() if origin.layer == "environment"}
    return {
        name: environ[name]
        for field, name in given.items()
        if field not in _OF_THIS_MACHINE and not options()[field].secret
    }


def manifest(
    kind: Kind, plan: Plan, words: list[str], image: str, environ: Mapping[str, str]
) -> dict[str, Any]:
    """The manifest that serves `plan`; `words` and `environ` (see `carried`) are those of `serve`.

    Raises CONFIG for a plan of another topology.
    """
    topology = plan.topology
    wanted = "ray" if kind == "kuberay" else "mp"
    if topology.mode != wanted:
        what = f"the plan is for {'one machine' if topology.mode == 'machine' else topology.mode}"
        action = (
            "set NIBBLE_CLUSTER=ray and HEAD_IP" if kind == "kuberay" else "set NIBBLE_NNODES and HEAD_IP"
        )
        raise NibbleError(ExitCode.CONFIG, what, f"one that {kind} can run", action)
    make = _ray_cluster if kind == "kuberay" else _leader_worker_set
    return make(plan, words, image, environ)


def _ray_cluster(plan: Plan, words: list[str], image: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The operator's own start command is replaced by ours (its annotation for that). It gives its token to the first container
    of a pod only (kuberay common/pod.go configureTokenAuth), so the server asks for the same Secret.

    The server is a container of the head's pod: a Ray driver needs its node's sockets (/tmp) and shared memory.
    """
    gpus = plan.topology.ranks_here
    workers = -(-plan.topology.ranks // gpus) - 1
    pod_ip = _field("POD_IP", "status.podIP")
    head = _ray_probes() | _container(
        plan, "ray-head", image, f"HEAD_IP=$POD_IP exec {ENTRY} ray-head", [pod_ip], gpus
    )
    serve = _container(
        plan,
        "serve",
        image,
        f"HEAD_IP=$POD_IP exec {ENTRY} serve {_quoted(words)}",
        [
            pod_ip,
            _value("NIBBLE_CLUSTER", "ray"),
            _secret("NIBBLE_API_KEY", "api-key"),
            _hub_token(),
            _secret("RAY_AUTH_TOKEN", RAY_TOKEN_KEY, _name(plan)),
            *_settings(plan, environ),
        ],
        0,
    )
    serve |= _served(plan)
    worker = _ray_probes() | _container(
        plan,
        "ray-worker",
        image,
        f"HEAD_IP=$FQ_RAY_IP exec {ENTRY} ray-worker",
        [pod_ip, _value("WORKER_IP", "$(POD_IP)")],
        gpus,
    )
    groups = [
        {
            "groupName": "gpu",
            "replicas": workers,
            "minReplicas": workers,
            "maxReplicas": workers,
            "rayStartParams": {},
            "template": {"spec": _pod(plan, [worker])},
        }
    ]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": _name(plan), "annotations": {"ray.io/overwrite-container-cmd": "true"}},
        "spec": {
            "rayVersion": RAY_VERSION,
            "authOptions": {"mode": "token"},
            "headGroupSpec": {
                "rayStartParams": {},
                "template": {"spec": _pod(plan, [head, serve]) | {"shareProcessNamespace": True}},
            },
            "workerGroupSpecs": groups if workers else [],
        },
    }


def _leader_worker_set(
    plan: Plan, words: list[str], image: str, environ: Mapping[str, str]
) -> dict[str, Any]:
    """The leader is rank 0. No pod is recreated because another one restarts: the ranks find each other again by themselves."""
    topology = plan.topology
    pod_ip = _field("POD_IP", "status.podIP")
    common = [
        pod_ip,
        _value("WORKER_IP", "$(POD_IP)"),
        _value("NIBBLE_NNODES", str(topology.nodes)),
        _secret("NIBBLE_CLUSTER_TOKEN", "cluster-token"),
        _secret("NIBBLE_API_KEY", "api-key"),
        _hub_token(),
        *_settings(plan, environ),
    ]
    command = f"exec {ENTRY} serve {_quoted(words)}"
    leader = _container(
        plan, "serve", image, f"HEAD_IP=$POD_IP NIBBLE_NODE_RANK=0 {command}", common, topology.ranks_here
    )
    start = f"HEAD_IP=$LWS_LEADER_ADDRESS NIBBLE_NODE_RANK=$LWS_WORKER_INDEX {command}"
    worker = _container(plan, "serve", image, start, common, topology.ranks_here) | _probes(plan)
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": _name(plan)},
        "spec": {
            "replicas": 1,
            "leaderWorkerTemplate": {
                "size": topology.nodes,
                "restartPolicy": "None",
                "leaderTemplate": {"spec": _pod(plan, [leader | _served(plan)])},
                "workerTemplate": {"spec": _pod(plan, [worker])},
            },
        },
    }


def _name(plan: Plan) -> str:
    """A DNS label from the model's name, as KubeRay leaves it: from a letter on, and not too long for a pod's."""
    text = re.sub(r"[^a-z0-9]+", "-", plan.served_names[0].rsplit("/", 1)[-1].lower()).strip("-")
    return (text if text[:1].isalpha() else f"nibble-{text}")[:40].strip("-")


def _quoted(words: list[str]) -> str:
    return shlex.join(words)


def _settings(plan: Plan, environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """What was set here, with the plan's parallel sizes, which a recipe may have brought."""
    names = {
        "--tensor-parallel-size": "TENSOR_PARALLEL_SIZE",
        "--pipeline-parallel-size": "NIBBLE_PIPELINE_PARALLEL_SIZE",
    }
    sizes = {name: str(plan.args[flag].value) for flag, name in names.items() if flag in plan.args}
    return [_value(name, value) for name, value in {**environ, **sizes}.items()]


def _container(
    plan: Plan, name: str, image: str, script: str, environ: list[dict[str, Any]], gpus: int
) -> dict[str, Any]:
    mounts = [("cache", "/var/cache/nibble"), ("tmp", "/tmp"), ("shm", "/dev/shm")]
    limits = {"nvidia.com/gpu": str(gpus)} if gpus and plan.target.device == "cuda" else {}
    return {
        "name": name,
        "image": image,
        "command": ["/bin/bash", "-c", script],
        "env": environ,
        "resources": {"limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": 2000,
        },
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts],
    }


def _ray_probes() -> dict[str, Any]:
    """In place of the operator's own, which ask the dashboard that is off; the node's process ends with Ray."""
    check = {"tcpSocket": {"port": AGENT_PORT}, "periodSeconds": 5, "failureThreshold": 24}
    return {
        "ports": [{"name": "gcs", "containerPort": GCS_PORT}, {"name": "agent", "containerPort": AGENT_PORT}],
        "readinessProbe": check,
        "livenessProbe": check | {"initialDelaySeconds": 60},
    }


def _probes(plan: Plan) -> dict[str, Any]:
    """The control port answers from the first second, but on loopback only: the image's own health check asks it."""
    check = {
        "exec": {"command": ["/opt/venv/bin/python", "-ISB", "-c", _READY.format(plan.settings.control_port)]}
    }
    return {"readinessProbe": check | {"periodSeconds": 5, "timeoutSeconds": 5}}


_READY = "import urllib.request as u; u.urlopen('http://127.0.0.1:{}/ready', timeout=4)"


def _served(plan: Plan) -> dict[str, Any]:
    return {"ports": [{"name": "api", "containerPort": plan.settings.port}]} | _probes(plan)


def _pod(plan: Plan, containers: list[dict[str, Any]]) -> dict[str, Any]:
    """No service links: a Service called `vllm` would set variables that look like vLLM's."""
    volumes: list[dict[str, Any]] = [
        {"name": "cache", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    return {
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": plan.settings.drain_seconds + _DRAIN_MARGIN_S,
        "containers": containers,
        "volumes": volumes,
    }


def _value(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "value": value}


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _secret(name: str, key: str, secret: str = SECRET) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _hub_token() -> dict[str, Any]:
    """For gated and private models; a Secret without that key leaves the variable unset."""
    reference = {"name": SECRET, "key": "hf-token", "optional": True}
    return {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}}
