"""Kubernetes manifests from a plan: a KubeRay RayCluster, or a LeaderWorkerSet for vLLM's own way.

What all plans share is a Kustomize base (docker/kubernetes); here is the patch that a plan makes
for it. The result is printed as JSON, which kubectl reads as it does YAML. The pods run nibble's
own modes, so that gate, canary, watchdog, token and the fixed ports are those of every other
installation.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, Literal

from nibble.engine.flags import Flags, read_flags, split_words, write_flag
from nibble.engine.schema import load_schema
from nibble.errors import PASSWORD_IN_ADDRESS, ExitCode, NibbleError
from nibble.machine.paths import root
from nibble.plan.gather import Asked
from nibble.plan.plan import Plan
from nibble.settings.command_line import CommandLine
from nibble.settings.environment import nibble_names
from nibble.settings.options import options

Kind = Literal["kuberay", "lws"]
# The image's own ENTRYPOINT, as in the bases.
ENTRY = "tini -- /opt/nibble/docker/start.sh"
# in the Secret that KubeRay makes and names after the cluster (kuberay utils/constant.go)
RAY_TOKEN_KEY = "auth_token"
# Not for the pods: what each gets from its place, from its image, or for this machine only.
_OF_THIS_MACHINE = frozenset((
    "cache_dir", "cluster", "config", "head_ip", "host", "nnodes", "node_rank", "num_gpus",
    "target", "worker_ip",
))  # fmt: skip
# Variables other than nibble's options that vLLM, Ray, NCCL, Gloo or the Hub's client in
# the pods need as they are here …
_OF_OTHERS = ("VLLM_", "RAY_", "NCCL_", "GLOO_", "HF_ENDPOINT")
# … but for this machine's folders and addresses, what a pod has from its operator, and secrets …
_NOT_FOR_PODS = (
    "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_HOST_IP", "RAY_ADDRESS", "RAY_AUTH_",
    "RAY_REDIS_PASSWORD", "RAY_TMPDIR",
)  # fmt: skip
# … and of them what Ray's nodes need too: agent, preflight and all-reduce run there. vLLM's ranks
# have the server's environment.
_FOR_RAY_NODES = ("RAY_", "NCCL_", "GLOO_", "VLLM_NCCL_SO_PATH")
_SETTINGS_OF_RAY_NODES = ("cluster_interface", "memory_reserve_gib")
_DRAIN_MARGIN_S = 30


def read_kind(word: str) -> Kind:
    """`word` as a kind of manifest. Raises USAGE for another word."""
    if word not in ("kuberay", "lws"):
        raise NibbleError(
            ExitCode.USAGE,
            what=f"there is no manifest {word!r}",
            expected="kuberay or lws",
            action="correct the word",
        )
    return "kuberay" if word == "kuberay" else "lws"


def words_for(command: CommandLine) -> list[str]:
    """The words of `serve` in the pods: the given ones without options of this machine."""
    ours = [
        f"{options()[field].flag}={value}"
        for field, value in command.values.items()
        if field not in _OF_THIS_MACHINE and field != "model"
    ]
    model = [command.values["model"]] if "model" in command.values else []
    return [*model, *ours, *_words_for_pods(command.flags)]


def carried(asked: Asked, environ: Mapping[str, str]) -> dict[str, str]:
    """The given variables that the pods need too: name -> value, without secrets.

    Raises CONFIG for variables in a file, which the pods would not have.
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
    # Names that vLLM 0.32 lacks become flags here and in the pods.
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
        what = f"{secret} has a password in its address, which a manifest must not contain"
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
    """vLLM's flags without options of this machine."""
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
    return merged(_base(kind), make(plan, words, image, environ))


def merged(base: Any, patch: Any) -> Any:
    """`base` with `patch` on top, as in Kustomize's strategic merge: objects by their fields, lists
    of named objects by their names; everything else, an empty list too, replaces what was there.
    """
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        return {**base, **{key: merged(base.get(key), value) for key, value in patch.items()}}
    if isinstance(base, list) and isinstance(patch, list) and patch and all(map(_key, patch)):
        patches = {_key(one): one for one in patch}
        kept = [merged(one, patches.pop(_key(one), {})) for one in base]
        return [*kept, *patches.values()]
    return patch


def _key(one: Any) -> str | None:
    return (one.get("name") or one.get("groupName")) if isinstance(one, Mapping) else None


def _base(kind: Kind) -> dict[str, Any]:
    """The base of a kind. Raises CONFIG where it cannot be read."""
    import yaml

    folder = root() / "docker" / "kubernetes" / kind
    try:
        (name,) = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
        return yaml.safe_load((folder / name).read_text())
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError) as error:
        what = f"the Kubernetes base in {folder} cannot be read ({error.__class__.__name__})"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="a Kustomize base",
            action="set NIBBLE_ROOT to a checkout of nibble",
        ) from None


def _ray_cluster(
    plan: Plan, words: list[str], image: str, environ: Mapping[str, str]
) -> dict[str, Any]:
    gpus = plan.topology.ranks_here
    workers = -(-plan.topology.ranks // gpus) - 1
    node = _node_settings(plan, environ)
    head = {**_container("ray-head", image, node), **_gpus(plan, gpus)}
    reference = {"secretKeyRef": {"name": _name(plan), "key": RAY_TOKEN_KEY}}
    token = {"name": "RAY_AUTH_TOKEN", "valueFrom": reference}
    serve = {
        **_container("serve", image, [token, *_settings(plan, environ)]),
        **_command(f"HEAD_IP=$POD_IP exec {ENTRY} serve {shlex.join(words)}"),
        **_port(plan),
    }
    worker = {**_container("ray-worker", image, node), **_gpus(plan, gpus)}
    group = {
        "groupName": "gpu",
        "replicas": workers,
        "minReplicas": workers,
        "maxReplicas": workers,
        "template": _pod(plan, [worker]),
    }
    return {
        "metadata": {"name": _name(plan)},
        "spec": {
            "headGroupSpec": {"template": _pod(plan, [head, serve])},
            "workerGroupSpecs": [group] if workers else [],
        },
    }


def _leader_worker_set(
    plan: Plan, words: list[str], image: str, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Build the manifest; the leader is rank 0."""
    topology = plan.topology
    serve = {
        **_container(
            "serve",
            image,
            [_value("NIBBLE_NNODES", str(topology.nodes)), *_settings(plan, environ)],
        ),
        **_gpus(plan, topology.ranks_here),
    }
    command = f"exec {ENTRY} serve {shlex.join(words)}"
    leader = _command(f"HEAD_IP=$POD_IP NIBBLE_NODE_RANK=0 {command}")
    start = f"HEAD_IP=$LWS_LEADER_ADDRESS NIBBLE_NODE_RANK=$LWS_WORKER_INDEX {command}"
    return {
        "metadata": {"name": _name(plan)},
        "spec": {
            "leaderWorkerTemplate": {
                "size": topology.nodes,
                "leaderTemplate": _pod(plan, [{**serve, **leader, **_port(plan)}]),
                "workerTemplate": _pod(plan, [{**serve, **_command(start)}]),
            },
        },
    }


def _name(plan: Plan) -> str:
    """A DNS label from the model's name, as KubeRay leaves it: from a letter on, and not too
    long for a pod's.
    """
    text = re.sub(r"[^a-z0-9]+", "-", plan.served_names[0].rsplit("/", 1)[-1].lower()).strip("-")
    return (text if text[:1].isalpha() else f"nibble-{text}")[:40].strip("-")


def _settings(plan: Plan, environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """The user's settings, the plan's parallel sizes (which a recipe may set), and the port of the
    probes.
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
    """The user's variables and flags that a Ray node needs besides the server."""
    found = {name: value for name, value in environ.items() if name.startswith(_FOR_RAY_NODES)}
    for field in _SETTINGS_OF_RAY_NODES:
        value = getattr(plan.settings, field)
        if value is not None:
            found[options()[field].env[0]] = str(value)
    return [_value(name, value) for name, value in found.items()]


def _container(name: str, image: str, environ: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "image": image} | ({"env": environ} if environ else {})


def _command(script: str) -> dict[str, Any]:
    return {"command": ["/bin/bash", "-c", script]}


def _gpus(plan: Plan, gpus: int) -> dict[str, Any]:
    is_limited = gpus and plan.target.device == "cuda"
    return {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}} if is_limited else {}


def _port(plan: Plan) -> dict[str, Any]:
    return {"ports": [{"name": "api", "containerPort": plan.settings.port}]}


def _pod(plan: Plan, containers: list[dict[str, Any]]) -> dict[str, Any]:
    grace_s = plan.settings.drain_seconds + _DRAIN_MARGIN_S
    return {"spec": {"terminationGracePeriodSeconds": grace_s, "containers": containers}}


def _value(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "value": value}
