"""Kubernetes manifests from a plan, held to the CRDs of the two projects (with --network to the published ones)."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from crd_schemas import CRDS, KEPT, PLACES, WORDS, made, part, published, strict

from nibble.cluster.manifests import manifest, read_kind
from nibble.errors import ExitCode, NibbleError
from nibble.prepare import plan_for, read_wishes


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
            assert "exec tini -- /opt/nibble/docker/start.sh " in container["command"][2]
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


def variables(container: dict[str, Any]) -> dict[str, Any]:
    """Name -> value, or where the value is."""
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


def test_the_server_beside_the_ray_head_gets_the_operators_token_too() -> None:
    """The operator gives it to the first container of a pod only."""
    found = made("kuberay")
    _, serve = pods(found)[0]["containers"]
    secret = {"name": found["metadata"]["name"], "key": "auth_token"}
    assert variables(serve)["RAY_AUTH_TOKEN"] == {"secretKeyRef": secret}


@pytest.mark.parametrize("kind", PLACES)
def test_a_hub_token_comes_from_the_secret_where_it_has_one(kind: str) -> None:
    containers = [one for pod in pods(made(kind)) for one in pod["containers"]]
    servers = [one for one in containers if one["name"] == "serve"]
    for one in servers:
        reference = {"name": "nibble", "key": "hf-token", "optional": True}
        assert variables(one)["HF_TOKEN"] == {"secretKeyRef": reference}
    assert len(servers) == (1 if kind == "kuberay" else 2)


@pytest.mark.parametrize("kind", PLACES)
def test_what_was_set_as_variables_goes_into_the_pods_but_not_what_belongs_to_this_machine(kind: str) -> None:
    given = {"PORT": "9000", "NIBBLE_CLUSTER_WAIT_SECONDS": "900", "NIBBLE_CACHE_DIR": "/here"}
    found = made(kind, **PLACES[kind], **given)
    serve = next(one for one in pods(found)[0]["containers"] if one["name"] == "serve")
    assert serve["ports"] == [{"name": "api", "containerPort": 9000}]
    assert (variables(serve)["PORT"], variables(serve)["NIBBLE_CLUSTER_WAIT_SECONDS"]) == ("9000", "900")
    assert not {"NIBBLE_CACHE_DIR", "NUM_GPUS", "NIBBLE_NODE_RANK"} & set(variables(serve))
    assert len(variables(serve)) == len(serve["env"])


def test_a_settings_file_is_refused_for_no_pod_has_it(tmp_path: Path) -> None:
    (tmp_path / "nibble.toml").write_text("port = 9000")
    with pytest.raises(NibbleError, match="would not be in the pods") as caught:
        made("lws", **PLACES["lws"], NIBBLE_CONFIG=str(tmp_path / "nibble.toml"))
    assert caught.value.code == ExitCode.CONFIG


@pytest.mark.parametrize(
    ("model", "name"),
    [("org/3B.Model_v2", "nibble-3b-model-v2"), ("org/" + "x" * 60, "x" * 40), ("é", "nibble")],
)
def test_a_name_is_one_that_kuberay_leaves_as_it_is(model: str, name: str) -> None:
    plan = plan_for(read_wishes(WORDS, {"HEAD_IP": "head", **PLACES["lws"]}))
    found = manifest("lws", replace(plan, served_names=(model,)), WORDS, "nibble:b200", {})
    assert found["metadata"]["name"] == name


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


@pytest.mark.parametrize("kind", PLACES)
def test_manifests_are_valid_for_the_crds(kind: str) -> None:
    jsonschema.validate(made(kind), strict(json.loads(KEPT.read_text())[kind]))


@pytest.mark.parametrize("kind", PLACES)
def test_a_field_that_the_crd_does_not_have_is_noticed(kind: str) -> None:
    found = made(kind)
    pods(found)[0]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(jsonschema.ValidationError, match="'readinesProbe' was unexpected"):
        jsonschema.validate(found, strict(json.loads(KEPT.read_text())[kind]))


@pytest.mark.network
@pytest.mark.parametrize("kind", PLACES)
def test_the_kept_rules_are_those_of_the_published_crds(kind: str) -> None:
    with urllib.request.urlopen(f"https://raw.githubusercontent.com/{CRDS[kind]}", timeout=60) as answer:
        schema = published(answer.read().decode(), made(kind))
    assert part(schema, [made(kind)]) == json.loads(KEPT.read_text())[kind]
    jsonschema.validate(made(kind), strict(schema))
