"""Liveness kills, readiness never does: what the image asks, and the units of this repository."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from nibble.control import ControlServer
from nibble.paths import root


@pytest.fixture
def healthcheck() -> Any:
    spec = importlib.util.spec_from_file_location("healthcheck", root() / "docker" / "healthcheck.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def loading() -> Iterator[int]:
    """The control port of a server that loads."""
    control = ControlServer(0, lambda: {"state": "starting", "phase": "load"}, lambda: False)
    control.start()
    yield control.port
    control.close()


def test_a_server_that_loads_is_alive_and_not_ready(
    healthcheck: Any, loading: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIBBLE_CONTROL_PORT", str(loading))
    assert healthcheck.check(only_live=True) == (True, "/status 200")
    ready, why = healthcheck.check(only_live=False)
    assert not ready and why.startswith("/ready 503")


def test_where_nibble_is_gone_it_is_neither(healthcheck: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    monkeypatch.setenv("NIBBLE_CONTROL_PORT", str(free))
    assert not healthcheck.check(only_live=True)[0] and not healthcheck.check(only_live=False)[0]


def test_compose_restarts_on_exit_alone() -> None:
    compose = yaml.safe_load((root() / "docker" / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        assert service["restart"].startswith("on-failure"), name
        assert "healthcheck" not in service and "labels" not in service, name


def test_the_quadlet_unit_restarts_on_exit_alone_and_not_after_a_crash_loop() -> None:
    unit = (root() / "docker" / "quadlet" / "nibble.container").read_text()
    assert "Restart=on-failure" in unit and "RestartPreventExitStatus=75" in unit
    assert not [word for word in ("HealthOnFailure", "HealthCmd", "WatchdogSec") if word in unit]


def probes(data: Any) -> Iterator[tuple[str, Any]]:
    """Every Kubernetes probe in a document: (kind, probe)."""
    if isinstance(data, dict):
        for name, value in data.items():
            if name in ("livenessProbe", "readinessProbe", "startupProbe"):
                yield name, value
            yield from probes(value)
    elif isinstance(data, list):
        for value in data:
            yield from probes(value)


def test_no_kubernetes_manifest_kills_a_server_for_not_being_ready() -> None:
    for path in [*root().glob("docker/**/*.yaml"), *root().glob("manifests/**/*.yaml")]:
        for document in yaml.safe_load_all(path.read_text()):
            for kind, probe in probes(document):
                asked = probe.get("httpGet", {}).get("path", "") + " ".join(
                    probe.get("exec", {}).get("command", [])
                )
                if kind == "livenessProbe":
                    assert not [word for word in ("/ready", "/health ") if word in f"{asked} "], (
                        f"{path}: {asked}"
                    )
                    assert "healthcheck.py" not in asked or "live" in asked.split("healthcheck.py")[1], (
                        f"{path}: {asked}"
                    )
