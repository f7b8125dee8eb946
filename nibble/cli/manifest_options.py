"""What a cluster adds to every pod of a manifest: memory for /dev/shm, a cache that stays, RDMA
devices, the node's network.

A plan knows none of it: these are facts of the cluster, given to `nibble cluster manifest`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nibble.errors import ExitCode, NibbleError

_QUANTITY = re.compile(r"\d+(\.\d+)?(Ki|Mi|Gi|Ti|k|M|G|T)?")
_CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_RESOURCE = re.compile(r"([a-z0-9.-]+/[A-Za-z0-9_.-]+)(?:=([1-9]\d*))?")


@dataclass(frozen=True)
class PodOptions:
    """`shm` is a quantity such as 16Gi, `cache` a claim's name or a folder of each node, `rdma` a
    device plugin's resource with or without =NUMBER.
    """

    shm: str | None = None
    cache: str | None = None
    rdma: str | None = None
    host_network: bool = False


def with_options(found: dict[str, Any], options: PodOptions) -> dict[str, Any]:
    """The manifest `found`, its pods changed by `options`. Raises USAGE for a value without that
    form.
    """
    for pod in _pods(found):
        if options.shm is not None:
            _volume(pod, "shm", {"emptyDir": {"medium": "Memory", "sizeLimit": _size(options.shm)}})
        if options.cache is not None:
            _set_cache(pod, options.cache)
        if options.rdma is not None:
            _set_rdma(pod, *_devices(options.rdma))
        if options.host_network:
            # Names of Services still resolve: the default policy would take the node's servers.
            pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return found


def _pods(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    spec = found["spec"]
    if "leaderWorkerTemplate" in spec:
        template = spec["leaderWorkerTemplate"]
        yield template["leaderTemplate"]["spec"]
        yield template["workerTemplate"]["spec"]
        return
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        yield group["template"]["spec"]


def _volume(pod: dict[str, Any], name: str, source: dict[str, Any]) -> None:
    pod["volumes"] = [
        {"name": name, **source} if volume["name"] == name else volume for volume in pod["volumes"]
    ]


def _set_cache(pod: dict[str, Any], place: str) -> None:
    if place.startswith("/"):
        # Kubernetes would make a missing folder root's, which the pods cannot write.
        _volume(pod, "cache", {"hostPath": {"path": place, "type": "Directory"}})
        return
    if not _CLAIM.fullmatch(place):
        raise _refused(
            "--cache",
            place,
            "the name of a PersistentVolumeClaim, or an absolute path on the nodes",
        )
    _volume(pod, "cache", {"persistentVolumeClaim": {"claimName": place}})
    # The image's user is 2000 in group 0, and a new volume is root's.
    policy = {"fsGroup": 0, "fsGroupChangePolicy": "OnRootMismatch"}
    pod["securityContext"] = pod.get("securityContext", {}) | policy


def _set_rdma(pod: dict[str, Any], resource: str, count: str) -> None:
    """Devices, and the right to pin memory for them.

    A pod cannot raise its limit of locked memory, and a process of another user than root does not
    get an added capability. So these pods run as root with this capability alone.
    """
    for container in pod["containers"]:
        context = container["securityContext"] | {"runAsUser": 0, "runAsNonRoot": False}
        if "nvidia.com/gpu" in container["resources"]["limits"] or len(pod["containers"]) == 1:
            container["resources"]["limits"] |= {resource: count}
            context["capabilities"] = {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        container["securityContext"] = context


def _size(text: str) -> str:
    if not _QUANTITY.fullmatch(text):
        raise _refused("--shm", text, "a quantity such as 16Gi")
    return text


def _devices(text: str) -> tuple[str, str]:
    if not (match := _RESOURCE.fullmatch(text)):
        raise _refused("--rdma", text, "a resource such as rdma/hca_shared_devices_a or nic/rdma=4")
    return match[1], match[2] or "1"


def _refused(flag: str, value: str, expected: str) -> NibbleError:
    return NibbleError(
        ExitCode.USAGE,
        what=f"{flag} is {value!r}",
        expected=expected,
        action=f"correct or drop {flag}",
    )
