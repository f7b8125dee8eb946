"""What runs where: tests that cannot run here are deselected and named in the summary with the reason."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path

import containers
import pytest

# Cheap first: a mistake shows before anything is built.
FOLDERS = ("unit", "patches", "kernels", "e2e", "image", "cluster")
TESTS = Path(__file__).parent

left_out = pytest.StashKey[dict[str, list[str]]]()
seconds = pytest.StashKey[defaultdict[str, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")
    parser.addoption("--network", action="store_true", help="also run tests that need the internet")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # tests start hundreds of processes of the same files
    config.stash[left_out] = {}
    config.stash[seconds] = defaultdict(float)


def _folder(path: Path) -> str:
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else path.name


def _has_gpu() -> bool:
    return any(Path(sign).exists() for sign in ("/dev/nvidia0", "/dev/dxg"))


def _needs_engine(item: pytest.Item) -> bool:
    """Marked docker, or using the engine through a fixture."""
    return item.get_closest_marker("docker") is not None or "engine" in getattr(item, "fixturenames", ())


class Judge:
    """Says why a test cannot run here. With CI=true a missing engine is no reason: those tests then fail."""

    def __init__(self, config: pytest.Config) -> None:
        self.slow = config.getoption("--slow")
        self.network = config.getoption("--network")
        self.gpu = _has_gpu()
        self.ci = os.environ.get("CI") == "true"
        self._engine: bool | None = None

    def reason(self, item: pytest.Item) -> str | None:
        """The first reason to leave `item` out, or None."""
        if item.get_closest_marker("gpu") and not self.gpu:
            return "gpu: no NVIDIA GPU here"
        if item.get_closest_marker("network") and not self.network:
            return "network: needs the internet (pytest --network)"
        if item.get_closest_marker("slow") and not self.slow:
            return "slow: make test-all runs them"
        if _needs_engine(item) and not self.ci and not self.engine():
            return "docker: no Docker engine answers (setup/docker_engine.sh up starts one)"
        return None

    def engine(self) -> bool:
        """Asked once, and only where a container test was collected."""
        if self._engine is None:
            self._engine = containers.engine_answers()
        return self._engine


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    judge = Judge(config)
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        reason = judge.reason(item)
        if reason:
            config.stash[left_out].setdefault(reason, []).append(item.nodeid)
        (dropped if reason else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    order = {name: place for place, name in enumerate(FOLDERS)}
    items[:] = sorted(kept, key=lambda item: order.get(_folder(item.path), len(order)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    began = time.monotonic()
    try:
        return (yield)
    finally:
        item.config.stash[seconds][_folder(item.path)] += time.monotonic() - began


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for reason, names in config.stash[left_out].items():
        # Container tests are all or nothing: one line says it. The others are each named.
        terminalreporter.write_line(f"left out, {reason}: {len(names)}", yellow=True)
        for name in [] if reason.startswith("docker") else names:
            terminalreporter.write_line(f"    {name}")
    times = ", ".join(f"{folder} {spent:.0f} s" for folder, spent in config.stash[seconds].items())
    if times:
        terminalreporter.write_line(f"time: {times}")
