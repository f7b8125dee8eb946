"""What runs where: tests that cannot run here are deselected and named in the summary with the
reason.

`make test` runs them in two processes (pytest-xdist); what must not run at the same time is one
group.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support import changes
from tests.support.docker import containers
from tests.support.servers import serving

# Cheap first: a mistake shows before anything is built. Then what has few or long groups, and short
# ones last, so that both processes end together.
FOLDERS = ("unit", "patches", "image", "cluster", "e2e", "kernels")
# These folders and files share something: fixed ports and names of processes ("machine"), or the
# bytecode of unpacked releases, which one test writes while another copies it. Probes use all cores
# by themselves. Every other file is a group: its tests take ports of their process alone.
TOGETHER = {
    "patches": "patches",
    "image": "machine",
    "cluster": "machine",
    "e2e/test_ray_real.py": "machine",
}
TESTS = Path(__file__).parent

left_out = pytest.StashKey[dict[str, list[str]]]()
seconds = pytest.StashKey[defaultdict[str, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")
    parser.addoption("--network", action="store_true", help="also run tests that need the internet")


def pytest_configure(config: pytest.Config) -> None:
    # Tests start hundreds of processes of the same files
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    serving.vllm_cache()
    config.stash[left_out] = {}
    config.stash[seconds] = defaultdict(float)


def _folder(path: Path) -> str:
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else path.name


def group(nodeid: str) -> str:
    """Of tests that one process runs one after another: a file's, or those of several files."""
    file = nodeid.partition("::")[0].removeprefix("tests/")
    return TOGETHER.get(file) or TOGETHER.get(file.partition("/")[0]) or file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups in the order they were collected in; a GPU is for one process at a time."""
    from xdist.scheduler import LoadScopeScheduling

    gpu = _has_gpu()

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "machine" if gpu else group(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def _has_gpu() -> bool:
    return any(Path(sign).exists() for sign in ("/dev/nvidia0", "/dev/dxg"))


def _needs_engine(item: pytest.Item) -> bool:
    """Marked docker, or using the engine through a fixture."""
    return item.get_closest_marker("docker") is not None or "engine" in getattr(
        item, "fixturenames", ()
    )


class Judge:
    """Says why a test cannot run here. With CI=true, tests that need a Docker engine run, and fail
    where none answers.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.slow = config.getoption("--slow")
        self.network = config.getoption("--network")
        self.gpu = _has_gpu()
        self.vllm = importlib.util.find_spec("vllm") is not None  # without importing it
        self.ci = os.environ.get("CI") == "true"
        self._engine: bool | None = None

    def reason(self, item: pytest.Item) -> str | None:
        """The first reason to leave `item` out, or None."""
        if item.get_closest_marker("gpu") and not self.gpu:
            return "gpu: no NVIDIA GPU here"
        if item.get_closest_marker("network") and not self.network:
            return "network: needs the internet (pytest --network)"
        if item.get_closest_marker("vllm") and not self.vllm:
            return "vllm: not installed here"
        if item.get_closest_marker("slow") and not self.slow:
            return "slow: make test-all runs them"
        mark = None if self.slow else item.get_closest_marker("when_changed")
        if mark and not changes.is_changed(*mark.args):
            return "no file of theirs changed: make test-all runs them"
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


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of several tells the first one what it left out and how long it took."""
    if (told := getattr(session.config, "workeroutput", None)) is not None:
        told["left_out"], told["seconds"] = (
            session.config.stash[left_out],
            dict(session.config.stash[seconds]),
        )


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    told = getattr(node, "workeroutput", {})
    node.config.stash[left_out] |= told.get("left_out", {})  # each collects all tests
    for folder, spent in told.get("seconds", {}).items():
        node.config.stash[seconds][folder] += spent


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for reason, names in config.stash[left_out].items():
        terminalreporter.write_line(f"left out, {reason}: {len(names)}", yellow=True)
        files = Counter(name.partition("::")[0] for name in names)
        for file, count in (
            [] if reason.startswith("docker") else files.items()
        ):  # containers: all or nothing
            terminalreporter.write_line(f"    {file}: {count}")
    times = ", ".join(f"{folder} {spent:.0f} s" for folder, spent in config.stash[seconds].items())
    if times:
        terminalreporter.write_line(f"time: {times}")
