"""Liveness kills, readiness never does: what the image asks, and the units of this repository."""

from __future__ import annotations

import importlib.util
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nibble.machine.paths import root
from nibble.plan.cluster_ports import AGENT_PORT
from nibble.serve.control import ControlServer
from tests.support.cluster.crd_schemas import PLACES, made


@pytest.fixture
def healthcheck() -> Any:
    spec = importlib.util.spec_from_file_location(
        "healthcheck", root() / "docker" / "healthcheck.py"
    )
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


def test_the_port_is_the_one_nibble_has_command_line_before_variable_before_settings_file(
    healthcheck: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NIBBLE_CONTROL_PORT", raising=False)
    monkeypatch.delenv("NIBBLE_CONFIG", raising=False)
    settings = tmp_path / "nibble.toml"
    settings.write_text("control_port = 9001\n")
    assert healthcheck.control_port(["serve"]) == 8001
    assert healthcheck.control_port(["serve", "--config", str(settings)]) == 9001
    monkeypatch.setenv("NIBBLE_CONFIG", str(settings))
    assert healthcheck.control_port(["serve"]) == 9001
    monkeypatch.setenv("NIBBLE_CONTROL_PORT", "9002")
    assert healthcheck.control_port(["serve"]) == 9002
    assert healthcheck.control_port(["serve", "--control-port=9003"]) == 9003


@pytest.mark.parametrize("content", [None, "control_port = ", "control_port = 'many'"])
def test_settings_that_cannot_be_read_any_more_are_one_line(
    content: str | None, healthcheck: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NIBBLE_CONTROL_PORT", raising=False)
    monkeypatch.setenv("NIBBLE_CONFIG", str(tmp_path / "nibble.toml"))
    if content is not None:
        (tmp_path / "nibble.toml").write_text(content)
    healthy, why = healthcheck.check(only_live=True)
    assert not healthy and why.startswith("the control port is not known: ")


def test_where_nibble_is_gone_it_is_neither(
    healthcheck: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    monkeypatch.setenv("NIBBLE_CONTROL_PORT", str(free))
    assert not healthcheck.check(only_live=True)[0] and not healthcheck.check(only_live=False)[0]


def test_compose_restarts_on_exit_alone() -> None:
    compose = yaml.safe_load((root() / "docker" / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        assert service["restart"].startswith("on-failure"), name
        assert "healthcheck" not in service and "labels" not in service, name


def test_the_quadlet_unit_kills_for_liveness_alone_and_does_not_restart_after_a_crash_loop() -> (
    None
):
    unit = (root() / "docker" / "quadlet" / "nibble.container").read_text().splitlines()
    assert "Restart=on-failure" in unit and "RestartPreventExitStatus=2 5 6 75" in unit
    assert "HealthCmd=/opt/venv/bin/python -ISB /opt/nibble/docker/healthcheck.py live" in unit
    assert "HealthOnFailure=kill" in unit and "HealthStartPeriod=60m" in unit
    assert not [
        line for line in unit if line.startswith("WatchdogSec")
    ]  # it does not reach into a container


def test_the_systemd_unit_watches_nibble_and_stops_it_alone() -> None:
    unit = (root() / "docker" / "systemd" / "nibble.service").read_text().splitlines()
    for line in (
        "Type=notify",
        "NotifyAccess=main",
        "WatchdogSec=60",
        "KillMode=mixed",
        "Restart=on-failure",
    ):
        assert line in unit
    assert "RestartPreventExitStatus=2 5 6 75" in unit


@pytest.mark.parametrize(
    "says", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 503 Service Unavailable\r\n\r\n", None]
)
def test_a_control_port_that_hangs_or_talks_nonsense_is_unhealthy(
    says: bytes | None, healthcheck: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(healthcheck, "TIMEOUT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("NIBBLE_CONTROL_PORT", str(server.getsockname()[1]))

        def answer() -> None:
            taken = server.accept()[0]
            if says is None:  # takes the connection and says nothing, as a hung process does
                time.sleep(2)
            else:
                taken.recv(1000)
                taken.sendall(says)
            taken.close()

        thread = threading.Thread(target=answer)
        thread.start()
        healthy, why = healthcheck.check(only_live=False)
        thread.join(5)
    assert not healthy and why


def containers(data: Any) -> Iterator[dict[str, Any]]:
    """Every container in a Kubernetes manifest."""
    if isinstance(data, dict):
        yield from data.get("containers", [])
        for value in data.values():
            yield from containers(value)
    elif isinstance(data, list):
        for value in data:
            yield from containers(value)


@pytest.mark.parametrize("kind", PLACES)
def test_kubernetes_ends_a_server_where_nibble_does_not_run_and_not_for_being_unready(
    kind: str,
) -> None:
    found = list(containers(made(kind, "--control-port", "9001")))
    servers = [one for one in found if one["name"] == "serve"]
    nodes = [one for one in found if one not in servers]
    assert [len(servers), len(nodes)] == ([1, 2] if kind == "kuberay" else [2, 0])
    documented = (root() / "docs" / "operations.md").read_text()
    for one in servers:
        live, ready = (
            one[probe]["exec"]["command"] for probe in ("livenessProbe", "readinessProbe")
        )
        assert live == [*ready, "live"]
        assert f"exec: [{', '.join(live)}]" in documented
        assert {"name": "NIBBLE_CONTROL_PORT", "value": "9001"} in one["env"]
    for one in nodes:  # Ray's: the agent's port is open while one runs
        assert one["livenessProbe"]["tcpSocket"] == {"port": AGENT_PORT}
