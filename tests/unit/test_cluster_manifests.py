"""Kubernetes manifests from a plan, held to the CRDs of the two projects (with --network to the
published ones).
"""

from __future__ import annotations

import json
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from nibble.cli.manifests import manifest, merged, read_kind
from nibble.errors import ExitCode, NibbleError
from nibble.machine.paths import root
from nibble.plan.cluster_ports import AGENT_PORT, GCS_PORT
from nibble.plan.gather import plan_for, read_wishes
from tests.support.cluster.crd_schemas import (
    CRDS,
    KEPT,
    PLACES,
    WORDS,
    made,
    part,
    pods,
    published,
    strict,
    variants,
)


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
        made(
            kind, **PLACES[kind], NIBBLE_API_KEY="hush-hush-hush", NIBBLE_CLUSTER_TOKEN="hush-hush"
        )
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
        one["resources"]["limits"].get("nvidia.com/gpu")
        for one in head["containers"] + worker["containers"]
    ]
    assert limits == ["2", None, "2"]  # 4 ranks: the server itself takes no GPU


def variables(container: dict[str, Any]) -> dict[str, Any]:
    """Name -> value, or where the value is."""
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


def test_the_bases_are_kustomizations_with_the_ports_and_versions_of_this_release() -> None:
    folder = root() / "docker" / "kubernetes"
    assert {one.name for one in folder.iterdir()} == set(PLACES)
    for kind in PLACES:
        listed = yaml.safe_load((folder / kind / "kustomization.yaml").read_text())["resources"]
        assert {one.name for one in (folder / kind).iterdir()} == {"kustomization.yaml", *listed}
    found = made("kuberay")
    lock = (root() / "requirements" / "cuda.lock").read_text()
    assert f"\nray=={found['spec']['rayVersion']} " in lock
    for pod in pods(found):
        ports = {one["name"]: one["containerPort"] for one in pod["containers"][0]["ports"]}
        assert ports == {"gcs": GCS_PORT, "agent": AGENT_PORT}


def test_an_image_has_the_bases() -> None:
    assert "!docker/kubernetes\n" in (root() / ".dockerignore").read_text()
    for file in (root() / "docker").glob("Dockerfile.*"):
        assert "COPY docker/kubernetes /opt/nibble/docker/kubernetes/\n" in file.read_text()


def test_a_base_that_cannot_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "docker" / "kubernetes" / "lws"
    folder.mkdir(parents=True)
    plan = plan_for(read_wishes(WORDS, {"HEAD_IP": "head", **PLACES["lws"]}))
    monkeypatch.setenv("NIBBLE_ROOT", str(tmp_path))
    for text in ("", "[", "resources: [none.yaml]"):
        (folder / "kustomization.yaml").write_text(text)
        with pytest.raises(NibbleError, match=r"Kubernetes base in .* cannot be read") as refused:
            manifest("lws", plan, WORDS, "nibble:b200", {})
        assert refused.value.code == ExitCode.CONFIG


def test_a_patch_is_merged_by_fields_and_names() -> None:
    base = {"a": 1, "list": [{"name": "x", "keep": 1, "v": 1}, {"name": "y"}], "words": [1, 2]}
    patch = {"list": [{"name": "z"}, {"name": "x", "v": 2}], "words": [3], "b": {}}
    assert merged(base, patch) == {
        "a": 1,
        "b": {},
        "list": [{"name": "x", "keep": 1, "v": 2}, {"name": "y"}, {"name": "z"}],
        "words": [3],
    }
    assert merged(base, {"list": []})["list"] == []


def test_every_ray_node_knows_its_address_and_one_node_alone_has_no_workers() -> None:
    head, worker = pods(made("kuberay"))
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    assert variables(head["containers"][0]) == {"POD_IP": address}
    assert variables(worker["containers"][0]) == {"POD_IP": address, "WORKER_IP": "$(POD_IP)"}
    alone = made("kuberay", **{**PLACES["kuberay"], "NUM_GPUS": "4"})
    assert alone["spec"]["workerGroupSpecs"] == []


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
def test_what_was_set_as_variables_goes_into_the_pods_but_not_what_belongs_to_this_machine(
    kind: str,
) -> None:
    given = {"PORT": "9000", "NIBBLE_CLUSTER_WAIT_SECONDS": "900", "NIBBLE_CACHE_DIR": "/here"}
    found = made(kind, **PLACES[kind], **given)
    serve = next(one for one in pods(found)[0]["containers"] if one["name"] == "serve")
    assert serve["ports"] == [{"name": "api", "containerPort": 9000}]
    assert (variables(serve)["PORT"], variables(serve)["NIBBLE_CLUSTER_WAIT_SECONDS"]) == (
        "9000",
        "900",
    )
    assert not {"NIBBLE_CACHE_DIR", "NUM_GPUS", "NIBBLE_NODE_RANK"} & set(variables(serve))
    assert len(variables(serve)) == len(serve["env"])


@pytest.mark.parametrize("kind", PLACES)
def test_variables_of_vllm_nccl_and_ray_go_into_the_pods_but_for_secrets_and_this_machines_folders(
    kind: str,
) -> None:
    given = {
        # vLLM no longer has it: nibble makes a flag of it, in the pods too
        "VLLM_ATTENTION_BACKEND": "FLASHINFER",
        "VLLM_MARLIN_USE_ATOMIC_ADD": "1",
        "NCCL_DEBUG": "INFO",
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_KEY": "/tls/node.key",
    }
    kept_here = {
        "VLLM_CACHE_ROOT": "/here",
        "VLLM_HOST_IP": "10.0.0.9",
        "RAY_ADDRESS": "10.0.0.9:6379",
    }
    secrets = {
        "VLLM_API_KEY": "hush-hush-hush",
        "RAY_AUTH_TOKEN": "hush-hush",
        "RAY_REDIS_PASSWORD": "hush",
    }
    found = made(kind, **PLACES[kind], **given, **kept_here, **secrets)
    servers = [one for pod in pods(found) for one in pod["containers"] if one["name"] == "serve"]
    for one in servers:
        assert given.items() <= variables(one).items()
        assert not set(kept_here) & set(variables(one))
    assert "hush" not in json.dumps(found)


def test_an_address_with_a_password_is_not_written_into_a_manifest() -> None:
    with pytest.raises(NibbleError, match="HF_ENDPOINT has a password") as refused:
        made("lws", **PLACES["lws"], HF_ENDPOINT="https://me:hush-hush@hub.example")
    assert refused.value.code == ExitCode.CONFIG and "hush" not in refused.value.line()


@pytest.mark.parametrize("way", ["variable", "flag"])
def test_rays_nodes_get_what_the_network_and_their_watchdog_need(way: str) -> None:
    wanted = {"NIBBLE_CLUSTER_INTERFACE": "eth1", "NIBBLE_MEMORY_RESERVE_GIB": "12.0"}
    words = ["--cluster-interface", "eth1", "--memory-reserve-gib", "12"] if way == "flag" else []
    network = {"NCCL_IB_HCA": "mlx5_0:1", "GLOO_SOCKET_IFNAME": "eth1", "RAY_USE_TLS": "1"}
    others = {"PORT": "9000", "VLLM_MARLIN_USE_ATOMIC_ADD": "1"}
    settings = {} if way == "flag" else wanted
    found = made("kuberay", *words, **PLACES["kuberay"], **network, **others, **settings)
    head, worker = (pod["containers"][0] for pod in pods(found))
    for one in (head, worker):
        assert (wanted | network).items() <= variables(one).items()
        assert not set(others) & set(variables(one))


def test_with_ray_the_pods_get_the_model_from_the_servers_unless_they_were_told_otherwise() -> None:
    """Each pod has an empty cache, and without this the preflight would demand the model in all of
    them.
    """

    def where(*words: str, **environ: str) -> tuple[str, bool]:
        serve = pods(made("kuberay", *words, **PLACES["kuberay"], **environ))[0]["containers"][1]
        return (
            variables(serve)["NIBBLE_CLUSTER_MODEL"],
            "--cluster-model=own" in serve["command"][2],
        )

    assert where() == ("head", False)
    assert where(NIBBLE_CLUSTER_MODEL="own") == ("own", False)
    assert where("--cluster-model", "own") == ("head", True)  # and the command line wins


@pytest.mark.parametrize("kind", PLACES)
def test_options_of_this_machine_stay_out_of_the_pods_command(kind: str) -> None:
    """Node rank 1 of the command line would win over the 0 of the leader's variable."""
    here = ["--num-gpus", "2", "--host", "10.0.0.9", "--seed", "3"]
    ranks = ["--nnodes=2", "--node-rank", "1"] if kind == "lws" else ["--cluster", "ray"]
    more = {"VLLM_EXTRA_ARGS": "--kv-cache-dtype fp8 --node-rank 1"} if kind == "lws" else {}
    found = made(kind, *here, *ranks, **PLACES[kind], **more)
    servers = [one for pod in pods(found) for one in pod["containers"] if one["name"] == "serve"]
    for one in servers:
        command = one["command"][2].partition(" serve ")[2]
        assert command == "nibble-demo-nvfp4 --tensor-parallel-size=4 --seed 3"
        if kind == "lws":
            assert variables(one)["VLLM_EXTRA_ARGS"] == "--kv-cache-dtype fp8"


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


@pytest.mark.parametrize(
    ("kind", "environ"), [("kuberay", PLACES["lws"]), ("lws", PLACES["kuberay"])]
)
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
    for found in variants(kind):
        jsonschema.validate(found, strict(json.loads(KEPT.read_text())[kind]))


@pytest.mark.parametrize("kind", PLACES)
def test_a_field_that_the_crd_does_not_have_is_noticed(kind: str) -> None:
    found = made(kind)
    pods(found)[0]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(jsonschema.ValidationError, match="'readinesProbe' was unexpected"):
        jsonschema.validate(found, strict(json.loads(KEPT.read_text())[kind]))


@pytest.mark.network
@pytest.mark.parametrize("kind", PLACES)
def test_the_kept_rules_are_those_of_the_published_crds(kind: str) -> None:
    with urllib.request.urlopen(
        f"https://raw.githubusercontent.com/{CRDS[kind]}", timeout=60
    ) as answer:
        schema = published(answer.read().decode(), made(kind))
    assert part(schema, variants(kind)) == json.loads(KEPT.read_text())[kind]
    for found in variants(kind):
        jsonschema.validate(found, strict(schema))
