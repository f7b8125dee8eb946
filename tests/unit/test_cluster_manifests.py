"""Kubernetes manifests from a plan; --network holds them to the CRD schemas of the two projects."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from nibble.cluster.manifests import manifest, read_kind
from nibble.errors import ExitCode, NibbleError
from nibble.prepare import plan_for, read_wishes

WORDS = ["nibble-demo-nvfp4", "--tensor-parallel-size", "4", "--target", "b200"]
PLACES = {
    "kuberay": {"NIBBLE_CLUSTER": "ray", "NUM_GPUS": "2"},
    "lws": {"NIBBLE_NNODES": "2", "NUM_GPUS": "2"},
}
# The newest commits read when this was written (2026-08-19 and 2026-08-21).
CRDS = {
    "kuberay": "ray-project/kuberay/feeaf72fa/ray-operator/config/crd/bases/ray.io_rayclusters.yaml",
    "lws": "kubernetes-sigs/lws/060ab4d/config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",
}


def made(kind: str, **environ: str) -> dict[str, Any]:
    plan = plan_for(read_wishes(WORDS, {"HEAD_IP": "head", **(environ or PLACES[kind])}))
    return json.loads(json.dumps(manifest(read_kind(kind), plan, WORDS, "nibble:b200")))


def pods(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod specs in a manifest."""
    spec = found["spec"]
    if found["kind"] == "RayCluster":
        groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
        return [group["template"]["spec"] for group in groups]
    template = spec["leaderWorkerTemplate"]
    return [template["leaderTemplate"]["spec"], template["workerTemplate"]["spec"]]


@pytest.mark.parametrize("kind", PLACES)
def test_pods_run_nibbles_modes_hardened_and_without_service_links(kind: str) -> None:
    for pod in pods(made(kind)):
        assert pod["enableServiceLinks"] is False
        assert pod["terminationGracePeriodSeconds"] == 60
        for container in pod["containers"]:
            assert "/opt/nibble/entrypoint.sh" in container["command"][2]
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["runAsUser"] == 2000
            assert "readinessProbe" in container


@pytest.mark.parametrize("kind", PLACES)
def test_no_secret_is_written_down(kind: str) -> None:
    text = json.dumps(
        made(kind, **PLACES[kind], NIBBLE_API_KEY="hush-hush-hush", NIBBLE_CLUSTER_TOKEN="hush-hush")
    )
    assert "hush" not in text
    assert "secretKeyRef" in text


def test_kuberay_asks_for_a_token_and_leaves_ray_start_to_nibble() -> None:
    found = made("kuberay")
    assert found["spec"]["authOptions"] == {"mode": "token"}
    assert found["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    head, worker = pods(found)
    assert [one["name"] for one in head["containers"]] == ["ray-head", "serve"]
    assert found["spec"]["workerGroupSpecs"][0]["replicas"] == 1
    limits = [
        one["resources"]["limits"].get("nvidia.com/gpu") for one in head["containers"] + worker["containers"]
    ]
    assert limits == ["2", None, "2"]  # 4 ranks: the server itself takes no GPU


def test_a_leader_worker_set_has_a_pod_for_each_node() -> None:
    found = made("lws")
    assert found["spec"]["leaderWorkerTemplate"]["size"] == 2
    leader, worker = (pod["containers"][0]["command"][2] for pod in pods(found))
    assert "NIBBLE_NODE_RANK=0" in leader
    assert "NIBBLE_NODE_RANK=$LWS_WORKER_INDEX" in worker


@pytest.mark.parametrize(("kind", "environ"), [("kuberay", PLACES["lws"]), ("lws", PLACES["kuberay"])])
def test_a_plan_of_another_topology_is_refused(kind: str, environ: dict[str, str]) -> None:
    with pytest.raises(NibbleError, match="the plan is for") as caught:
        made(kind, **environ)
    assert caught.value.code == ExitCode.CONFIG


def test_another_kind_is_a_usage_error() -> None:
    with pytest.raises(NibbleError, match="kuberay or lws") as caught:
        read_kind("helm")
    assert caught.value.code == ExitCode.USAGE


def strict(node: Any) -> Any:
    """A CRD's schema as JSON Schema that refuses unknown fields, as the API server's strict validation does."""
    if isinstance(node, list):
        return [strict(one) for one in node]
    if not isinstance(node, dict):
        return node
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {name: strict(value) for name, value in node.items()}
    if (
        "properties" in found
        and found.get("type") == "object"
        and not found.get("x-kubernetes-preserve-unknown-fields")
    ):
        found.setdefault("additionalProperties", False)
    return found


@pytest.mark.network
@pytest.mark.parametrize("kind", PLACES)
def test_manifests_are_valid_for_the_crds(kind: str) -> None:
    import jsonschema
    import yaml

    found = made(kind)
    with urllib.request.urlopen(f"https://raw.githubusercontent.com/{CRDS[kind]}", timeout=60) as answer:
        versions = yaml.safe_load(answer.read())["spec"]["versions"]
    version = found["apiVersion"].rpartition("/")[2]
    schema = next(one for one in versions if one["name"] == version)["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.validate(found, strict(schema), jsonschema.Draft202012Validator)
