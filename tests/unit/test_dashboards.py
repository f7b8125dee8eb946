"""Grafana's dashboard, Prometheus's rules and compose's profile `metrics` fit nibble's metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from nibble.machine.gpu_state import GpuState
from nibble.machine.paths import root
from nibble.serve import traffic
from nibble.serve.live import metrics_text

METRICS = root() / "docker" / "metrics"
DASHBOARD = METRICS / "grafana" / "dashboards" / "nibble.json"
STATUS = {
    "state": "ready",
    "phase": "ready",
    "memory": dict.fromkeys(
        ("available_bytes", "reserve_bytes", "pause_below_bytes", "stop_below_bytes",
         "resume_from_bytes"), 1),
}  # fmt: skip
GPU = GpuState(0, 0, 1000, 2000, 100.0, 200.0, 50, 10, 0)
ALERTS = {
    *("NotReady", "CanaryFailed", "WatchdogPaused", "KVCacheFull", "SlowFirstToken", "Throttled"),
    "FailedStarts",
}


def known() -> set[str]:
    """Names of nibble's metrics and of those of vLLM that the status page reads too."""
    own = set(re.findall(r"^# TYPE (\S+)", metrics_text(STATUS, 0, [GPU]), re.MULTILINE))
    theirs = {value for value in vars(traffic).values() if str(value).startswith("vllm:")}
    return own | theirs


def names(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:nibble_\w+|vllm:\w+)", expression))


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((METRICS / "rules.yml").read_text())["groups"]
    return group["rules"]


def panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text())["panels"]


def test_every_alert_of_the_list_is_there_with_severity_and_action() -> None:
    assert {rule["alert"] for rule in rules()} == ALERTS
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"] and rule["annotations"]["action"]


def test_rules_and_panels_ask_for_metrics_that_exist() -> None:
    expressions = [rule["expr"] for rule in rules()]
    expressions += [target["expr"] for panel in panels() for target in panel["targets"]]
    for expression in expressions:
        assert names(expression) and not names(expression) - known(), expression


def test_the_dashboard_has_what_grafana_requires() -> None:
    found = json.loads(DASHBOARD.read_text())
    assert found["schemaVersion"] >= 36 and found["uid"] and found["title"] == "nibble"
    assert len({panel["id"] for panel in panels()}) == len(panels())
    (source,) = yaml.safe_load(
        (METRICS / "grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"]
    variables = {one["name"] for one in found["templating"]["list"]}
    for panel in panels():
        assert panel["type"] in ("timeseries", "stat") and panel["title"]
        assert panel["datasource"]["uid"] == source["uid"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables
        for step in panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", ()):
            assert step["color"] and "value" in step


def lost(source: Any, kept: Any, place: str = "") -> Iterator[str]:
    """Places whose value another JSON does not have."""
    if isinstance(source, dict) and isinstance(kept, dict):
        for key, value in source.items():
            if key in kept:
                yield from lost(value, kept[key], f"{place}.{key}")
            else:
                yield f"{place}.{key}"
    elif isinstance(source, list) and isinstance(kept, list) and len(source) == len(kept):
        for number, pair in enumerate(zip(source, kept, strict=True)):
            yield from lost(*pair, f"{place}[{number}]")
    elif source != kept:
        yield place


def through_grafanas_types(source: dict[str, Any]) -> dict[str, Any]:
    """The dashboard as the types made from Grafana's schema keep it."""
    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(source)))


def test_grafanas_schema_knows_every_key_of_the_dashboard() -> None:
    source = json.loads(DASHBOARD.read_text())
    assert list(lost(source, through_grafanas_types(source))) == []
    image = yaml.safe_load((root() / "docker" / "compose.yaml").read_text())["services"]["grafana"]
    assert (
        f"grafana:{version('grafana-foundation-sdk').partition('!')[2].rpartition('.')[0]}."
        in (image["image"])
    )


@pytest.mark.parametrize(
    ("place", "value"),
    [("gridPoss", {}), ("fieldConfig.defaults.unitt", "s"), ("targets", [{"exprr": "up"}])],
)
def test_a_key_that_grafana_does_not_know_is_found(place: str, value: object) -> None:
    source = json.loads(DASHBOARD.read_text())
    *folders, key = place.split(".")
    inside = source["panels"][0]
    for one in folders:
        inside = inside[one]
    inside[key] = value
    assert any(found.endswith(("gridPoss", "unitt", "exprr")) for found in lost(
        source, through_grafanas_types(source)
    ))  # fmt: skip


def cells() -> Iterator[tuple[int, int]]:
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                yield x, y


def test_panels_do_not_lie_upon_each_other() -> None:
    found = list(cells())
    assert len(set(found)) == len(found)


def test_compose_mounts_files_that_exist_and_opens_ports_on_loopback_only() -> None:
    services = yaml.safe_load((root() / "docker" / "compose.yaml").read_text())["services"]
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["metrics"]
        assert all(port.startswith("127.0.0.1:") for port in services[name]["ports"])
        for volume in services[name]["volumes"]:
            place = Path(volume.split(":")[0])
            assert not volume.startswith(".") or (root() / "docker" / place).exists()
    scrape = yaml.safe_load((METRICS / "prometheus.yml").read_text())["scrape_configs"][0]
    assert set(scrape["dns_sd_configs"][0]["names"]) == {"gpu", "cpu"}
    assert scrape["authorization"]["credentials_file"] == "/run/secrets/api_key"
    assert "api_key" in services["prometheus"]["secrets"]


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_braces_of_an_expression_match(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        for left, right in ("()", "{}", "[]"):
            assert target["expr"].count(left) == target["expr"].count(right)
