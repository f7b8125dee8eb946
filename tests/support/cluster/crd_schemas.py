"""What the CRDs of KubeRay and LWS say about the fields that nibble's manifests use: types,
required names, enumerations.

    git show COMMIT:PATH > kuberay.yaml, the same for lws.yaml (CRDS), then
    python -m tests.support.cluster.crd_schemas kuberay.yaml lws.yaml

writes crd_schemas.json. A field that a manifest begins to use is unknown there until it is written
again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nibble.cli.manifest_options import PodOptions, with_options
from nibble.cli.manifests import carried, manifest, read_kind, words_for
from nibble.plan.gather import plan_for, read_wishes
from tests.support.paths import ROOT

KEPT = ROOT / "tests/fixtures/crd_schemas.json"
WORDS = ["nibble-demo-nvfp4", "--tensor-parallel-size", "4", "--target", "b200"]
PLACES = {
    "kuberay": {"NIBBLE_CLUSTER": "ray", "NUM_GPUS": "2"},
    "lws": {"NIBBLE_NNODES": "2", "NUM_GPUS": "2"},
}
# The newest commits read when this was written (2026-08-19 and 2026-08-21).
CRDS = {
    "kuberay": (
        "ray-project/kuberay/feeaf72fa/ray-operator/config/crd/bases/ray.io_rayclusters.yaml"
    ),
    "lws": (
        "kubernetes-sigs/lws/060ab4d/config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml"
    ),
}
_RULES = (
    "additionalProperties",
    "anyOf",
    "enum",
    "format",
    "items",
    "maxItems",
    "maxLength",
    "maximum",
    "minItems",
    "minLength",
    "minimum",
    "pattern",
    "properties",
    "required",
    "type",
    "x-kubernetes-int-or-string",
    "x-kubernetes-preserve-unknown-fields",
)


# Every option of `nibble cluster manifest`, with a claim and with a folder.
OPTIONS = (
    PodOptions("16Gi", "nibble-cache", "rdma/hca_shared_devices_a=4", True),
    PodOptions(cache="/srv/nibble"),
)


def variants(kind: str) -> list[dict[str, Any]]:
    """A manifest without options, and with all of them."""
    return [made(kind), *(with_options(made(kind), options) for options in OPTIONS)]


def made(kind: str, *words: str, **environ: str) -> dict[str, Any]:
    """A manifest as kubectl reads it; `words` come after WORDS."""
    given = {"HEAD_IP": "head", **(environ or PLACES[kind])}
    asked = read_wishes([*WORDS, *words], given)
    plan, command = plan_for(asked), words_for(asked.command)
    return json.loads(
        json.dumps(manifest(read_kind(kind), plan, command, "nibble:b200", carried(asked, given)))
    )


def published(text: str, found: dict[str, Any]) -> dict[str, Any]:
    """The schema in a CRD's YAML for the version that manifest `found` names."""
    import yaml

    version = found["apiVersion"].rpartition("/")[2]
    versions = yaml.safe_load(text)["spec"]["versions"]
    return next(one for one in versions if one["name"] == version)["schema"]["openAPIV3Schema"]


def part(schema: dict[str, Any], values: Sequence[Any]) -> dict[str, Any]:
    """The rules of `schema` for the fields in `values`, and for those it requires; no text."""
    found = {name: schema[name] for name in _RULES if name in schema}
    objects = [one for one in values if isinstance(one, dict)]
    if fields := found.get("properties"):
        names = {name for one in objects for name in one} | set(found.get("required", ()))
        found["properties"] = {
            name: part(fields[name], [one[name] for one in objects if name in one])
            for name in sorted(names & set(fields))
        }
    if isinstance(others := found.get("additionalProperties"), dict):
        found["additionalProperties"] = part(
            others, [value for one in objects for value in one.values()]
        )
    if items := found.get("items"):
        found["items"] = part(
            items, [value for one in values if isinstance(one, list) for value in one]
        )
    return found


def strict(node: Any) -> Any:
    """A CRD's schema as JSON Schema that refuses unknown fields, as the API server's strict
    validation does.
    """
    if isinstance(node, list):
        return [strict(one) for one in node]
    if not isinstance(node, dict):
        return node
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {name: strict(value) for name, value in node.items()}
    is_open = found.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in found and found.get("type") == "object" and not is_open:
        found.setdefault("additionalProperties", False)
    return found


def pods(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod specs in a manifest."""
    spec = found["spec"]
    if found["kind"] == "RayCluster":
        groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
        return [group["template"]["spec"] for group in groups]
    template = spec["leaderWorkerTemplate"]
    return [template["leaderTemplate"]["spec"], template["workerTemplate"]["spec"]]


if __name__ == "__main__":
    texts = dict(zip(PLACES, map(Path, sys.argv[1:]), strict=True))
    kept = {
        kind: part(published(texts[kind].read_text(), made(kind)), variants(kind))
        for kind in PLACES
    }
    KEPT.write_text(json.dumps(kept, separators=(",", ":"), sort_keys=True) + "\n")
