"""Kubernetes manifests from a plan: a KubeRay RayCluster, or a LeaderWorkerSet for vLLM's own way.
Pure.

JSON, which kubectl reads as it does YAML. The pods run nibble's own modes, so that gate, canary,
watchdog, token and the fixed ports are those of every other installation.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, Literal

from nibble.engine.flags import Flags, read_flags, split_words, write_flag
from nibble.engine.schema import load_schema
from nibble.errors import PASSWORD_IN_ADDRESS, ExitCode, NibbleError
from nibble.plan.cluster_ports import AGENT_PORT, GCS_PORT
from nibble.plan.gather import Asked
from nibble.plan.plan import Plan
from nibble.settings.command_line import CommandLine
from nibble.settings.environment import nibble_names
from nibble.settings.options import options

Kind = Literal["kuberay", "lws"]
RAY_VERSION = "2.60.0"  # requirements/cuda.lock
# The image's own ENTRYPOINT: a process 1 that hands signals on and collects what ended.
ENTRY = "tini -- /opt/nibble/docker/start.sh"
# Made by the user: kubectl create secret generic nibble --from-file=api-key
# --from-file=cluster-token, and hf-token where the model needs one.
SECRET = "nibble"
# in the Secret that KubeRay makes and names after the cluster (kuberay utils/constant.go)
RAY_TOKEN_KEY = "auth_token"
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
# Variables that are no options of nibble's and that vLLM, Ray, NCCL, Gloo or the Hub's client in
# the pods need as they are here …
_OF_OTHERS = ("VLLM_", "RAY_", "NCCL_", "GLOO_", "HF_ENDPOINT")
# … but for this machine's folders and addresses, what a pod has from its operator, and secrets …
_NOT_FOR_PODS = (
    "VLLM_CACHE_ROOT",
    "VLLM_CONFIG_ROOT",
    "VLLM_HOST_IP",
    "RAY_ADDRESS",
    "RAY_AUTH_",
    "RAY_REDIS_PASSWORD",
    "RAY_TMPDIR",
)
# … and of them what Ray's nodes need too: agent, preflight and all-reduce run there. vLLM's ranks
# have the server's environment.
_FOR_RAY_NODES = ("RAY_", "NCCL_", "GLOO_", "VLLM_NCCL_SO_PATH")
_SETTINGS_OF_RAY_NODES = ("cluster_interface", "memory_reserve_gib")
_HEALTH_CHECK = [
    "/opt/venv/bin/python",
    "-ISB",
    "/opt/nibble/docker/healthcheck.py",
]  # the image's own
_DRAIN_MARGIN_S = 30


def read_kind(word: str) -> Kind:
    """`word` as a kind. Raises USAGE."""
    if word not in ("kuberay", "lws"):
        raise NibbleError(
            ExitCode.USAGE,
            what=f"there is no manifest {word!r}",
            expected="kuberay or lws",
            action="correct the word",
        )
    return "kuberay" if word == "kuberay" else "lws"


def words_for(command: CommandLine) -> list[str]:
    """The words of `serve` in the pods: those given here, but for options of this machine."""
    ours = [
        f"{options()[field].flag}={value}"
        for field, value in command.values.items()
        if field not in _OF_THIS_MACHINE and field != "model"
    ]
    model = [command.values["model"]] if "model" in command.values else []
    return [*model, *ours, *_words_for_pods(command.flags)]


def carried(asked: Asked, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ`, as it was given here, that the pods need too: name -> value, no
    secrets.

    Raises CONFIG where some are in a file, which the pods would not have.
    """
    if asked.settings.config:
        what = f"the settings file {asked.settings.config} would not be in the pods"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="variables or flags",
            action="unset NIBBLE_CONFIG and give them so",
        )
    names = [
        origin.name
        for field, origin in asked.loaded.origins.items()
        if origin.layer == "environment"
        and field not in _OF_THIS_MACHINE
        and not options()[field].secret
    ]
    # Names that vLLM no longer has became flags here, and will in the pods.
    names += asked.accepted.flag_origins.values()
    names += [
        name
        for name in asked.accepted.environ
        if name.startswith(_OF_OTHERS)
        and not name.startswith(_NOT_FOR_PODS)
        and name not in nibble_names()
    ]
    found = {name: environ[name] for name in names}
    if secret := next(
        (name for name, value in found.items() if PASSWORD_IN_ADDRESS.search(value)), None
    ):
        what = f"{secret} has a password in its address, and a manifest is no place for one"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="an address without a password",
            action="give the pods another one",
        )
    if more := found.get("VLLM_EXTRA_ARGS"):
        flags = read_flags(split_words(more, "VLLM_EXTRA_ARGS"), "VLLM_EXTRA_ARGS", load_schema())
        found["VLLM_EXTRA_ARGS"] = shlex.join(_words_for_pods(flags))
    return found


def _words_for_pods(flags: Flags) -> list[str]:
    """Flags of vLLM without those that are options of this machine."""
    ours = {options()[field].vllm for field in _OF_THIS_MACHINE}
    return [
        word
        for name, value in flags.items()
        if name not in ours
        for word in write_flag(name, value)
    ]


def manifest(
    kind: Kind, plan: Plan, words: list[str], image: str, environ: Mapping[str, str]
) -> dict[str, Any]:
    """The manifest that serves `plan`; `words` (see `words_for`) and `environ` (see `carried`) are
    those of `serve`.

    Raises CONFIG for a plan of another topology.
    """
    topology = plan.topology
    wanted = "ray" if kind == "kuberay" else "mp"
    if topology.mode != wanted:
        what = f"the plan is for {'one machine' if topology.mode == 'machine' else topology.mode}"
        action = (
            "set NIBBLE_CLUSTER=ray and HEAD_IP"
            if kind == "kuberay"
            else "set NIBBLE_NNODES and HEAD_IP"
        )
        raise NibbleError(
            ExitCode.CONFIG, what=what, expected=f"one that {kind} can run", action=action
        )
    make = _ray_cluster if kind == "kuberay" else _leader_worker_set
    return make(plan, words, image, environ)


def _ray_cluster(
    plan: Plan, words: list[str], image: str, environ: Mapping[str, str]
) -> dict[str, Any]:
    """The operator's own start command is replaced by ours (its annotation for that). It gives its
    token to the first container of a pod only (kuberay common/pod.go configureTokenAuth), so the
    server asks for the same Secret.

    The server is a container of the head's pod: a Ray driver needs its node's sockets (/tmp) and
    shared memory.
    """
    gpus = plan.topology.ranks_here
    workers = -(-plan.topology.ranks // gpus) - 1
    pod_ip = _field("POD_IP", "status.podIP")
    node = [pod_ip, *_node_settings(plan, environ)]
    head = _ray_probes() | _container(
        plan, "ray-head", image, f"HEAD_IP=$POD_IP exec {ENTRY} ray-head", node, gpus
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
            # Each pod has a cache of its own, and Ray's ranks look for the model at the server's
            # path.
            *_settings(plan, {"NIBBLE_CLUSTER_MODEL": "head", **environ}),
        ],
        0,
    )
    serve |= _served(plan)
    worker = _ray_probes() | _container(
        plan,
        "ray-worker",
        image,
        f"HEAD_IP=$FQ_RAY_IP exec {ENTRY} ray-worker",
        [*node, _value("WORKER_IP", "$(POD_IP)")],
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
        "metadata": {
            "name": _name(plan),
            "annotations": {"ray.io/overwrite-container-cmd": "true"},
        },
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
    """The leader is rank 0. No pod is recreated because another one restarts: the ranks find
    each other again by themselves.
    """
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
        plan,
        "serve",
        image,
        f"HEAD_IP=$POD_IP NIBBLE_NODE_RANK=0 {command}",
        common,
        topology.ranks_here,
    )
    start = f"HEAD_IP=$LWS_LEADER_ADDRESS NIBBLE_NODE_RANK=$LWS_WORKER_INDEX {command}"
    worker = _container(plan, "serve", image, start, common, topology.ranks_here) | _probes()
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
    """A DNS label from the model's name, as KubeRay leaves it: from a letter on, and not too
    long for a pod's.
    """
    text = re.sub(r"[^a-z0-9]+", "-", plan.served_names[0].rsplit("/", 1)[-1].lower()).strip("-")
    return (text if text[:1].isalpha() else f"nibble-{text}")[:40].strip("-")


def _quoted(words: list[str]) -> str:
    return shlex.join(words)


def _settings(plan: Plan, environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """What was set here, with the plan's parallel sizes, which a recipe may have brought, and
    the port that the probes ask.
    """
    names = {
        "--tensor-parallel-size": "TENSOR_PARALLEL_SIZE",
        "--pipeline-parallel-size": "NIBBLE_PIPELINE_PARALLEL_SIZE",
    }
    planned = {
        name: str(plan.args[flag].value) for flag, name in names.items() if flag in plan.args
    }
    planned["NIBBLE_CONTROL_PORT"] = str(plan.settings.control_port)
    return [_value(name, value) for name, value in {**environ, **planned}.items()]


def _node_settings(plan: Plan, environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Of what was set here, as variable or flag, what a Ray node needs beside the server."""
    found = {name: value for name, value in environ.items() if name.startswith(_FOR_RAY_NODES)}
    for field in _SETTINGS_OF_RAY_NODES:
        value = getattr(plan.settings, field)
        if value is not None:
            found[options()[field].env[0]] = str(value)
    return [_value(name, value) for name, value in found.items()]


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
    """In place of the operator's own, which ask the dashboard that is off; the node's process
    ends with Ray.
    """
    check = {"tcpSocket": {"port": AGENT_PORT}, "periodSeconds": 5, "failureThreshold": 24}
    return {
        "ports": [
            {"name": "gcs", "containerPort": GCS_PORT},
            {"name": "agent", "containerPort": AGENT_PORT},
        ],
        "readinessProbe": check,
        "livenessProbe": check | {"initialDelaySeconds": 60},
    }


def _probes() -> dict[str, Any]:
    """The image's health check asks the control port, which is open on loopback only: for readiness
    whether it serves, for liveness whether nibble runs at all (it loads, drains and waits for other
    nodes without being killed for it).
    """
    ready = {"exec": {"command": _HEALTH_CHECK}, "periodSeconds": 5, "timeoutSeconds": 5}
    live = ready | {"exec": {"command": [*_HEALTH_CHECK, "live"]}, "failureThreshold": 24}
    return {"readinessProbe": ready, "livenessProbe": live | {"initialDelaySeconds": 60}}


def _served(plan: Plan) -> dict[str, Any]:
    return {"ports": [{"name": "api", "containerPort": plan.settings.port}]} | _probes()


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
