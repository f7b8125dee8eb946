"""Options of `nibble cluster manifest` change every pod, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from nibble.cli.app import app
from nibble.cli.manifest_options import PodOptions, with_options
from nibble.errors import ExitCode, NibbleError
from tests.support.cluster.crd_schemas import PLACES, WORDS, made, pods


def volume(pod: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [one for one in pod["volumes"] if one["name"] == name]
    return found


@pytest.mark.parametrize("kind", PLACES)
def test_without_options_a_manifest_stays_as_it_is(kind: str) -> None:
    assert with_options(made(kind), PodOptions()) == made(kind)


@pytest.mark.parametrize("kind", PLACES)
def test_shared_memory_gets_a_limit(kind: str) -> None:
    for pod in pods(with_options(made(kind), PodOptions(shm="16Gi"))):
        assert volume(pod, "shm")["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
        assert volume(pod, "cache")["emptyDir"] == {}


@pytest.mark.parametrize("kind", PLACES)
def test_a_claim_is_mounted_for_group_0(kind: str) -> None:
    for pod in pods(with_options(made(kind), PodOptions(cache="models"))):
        assert volume(pod, "cache") == {
            "name": "cache", "persistentVolumeClaim": {"claimName": "models"},
        }  # fmt: skip
        assert pod["securityContext"]["fsGroup"] == 0


@pytest.mark.parametrize("kind", PLACES)
def test_a_folder_of_the_nodes_must_be_there(kind: str) -> None:
    for pod in pods(with_options(made(kind), PodOptions(cache="/srv/nibble"))):
        assert volume(pod, "cache")["hostPath"] == {"path": "/srv/nibble", "type": "Directory"}


@pytest.mark.parametrize("kind", PLACES)
def test_rdma_devices_come_with_the_right_to_pin_memory(kind: str) -> None:
    containers = [
        one
        for pod in pods(with_options(made(kind), PodOptions(rdma="rdma/hca=4")))
        for one in pod["containers"]
    ]
    for one in containers:
        context = one["securityContext"]
        assert (context["runAsUser"], context["runAsNonRoot"]) == (0, False)
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        limits = one["resources"]["limits"]
        assert limits.get("rdma/hca") == ("4" if "nvidia.com/gpu" in limits else None)
        wanted = ["IPC_LOCK"] if "nvidia.com/gpu" in limits else None
        assert context["capabilities"].get("add") == wanted
        assert context["capabilities"]["drop"] == ["ALL"]


@pytest.mark.parametrize("kind", PLACES)
def test_the_nodes_network_keeps_names_of_services(kind: str) -> None:
    for pod in pods(with_options(made(kind), PodOptions(host_network=True))):
        assert pod["hostNetwork"] is True and pod["dnsPolicy"] == "ClusterFirstWithHostNet"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (PodOptions(shm="much"), "--shm is 'much'"),
        (PodOptions(cache="Models"), "--cache is 'Models'"),
        (PodOptions(rdma="hca"), "--rdma is 'hca'"),
        (PodOptions(rdma="rdma/hca=0"), "--rdma is 'rdma/hca=0'"),
    ],
)
def test_a_value_without_its_form_is_a_usage_error(options: PodOptions, named: str) -> None:
    with pytest.raises(NibbleError, match=named) as caught:
        with_options(made("lws"), options)
    assert caught.value.code == ExitCode.USAGE


def test_the_command_takes_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HEAD_IP": "head", **PLACES["lws"]}.items():
        monkeypatch.setenv(name, value)
    words = ["cluster", "manifest", "lws", *WORDS, "--shm", "8Gi", "--rdma", "nic/rdma"]
    ran = CliRunner().invoke(app, [*words, "--host-network", "--cache", "models"])
    assert ran.exit_code == 0, ran.output
    for pod in pods(json.loads(ran.stdout)):
        assert pod["hostNetwork"] and volume(pod, "shm")["emptyDir"]["sizeLimit"] == "8Gi"
        assert volume(pod, "cache")["persistentVolumeClaim"] == {"claimName": "models"}
        assert pod["containers"][0]["resources"]["limits"]["nic/rdma"] == "1"
