"""What runs where: tests that cannot run here are deselected and named in the summary with the
reason.

`make test` runs them in three processes (pytest-xdist), of which two at most start servers; what
must not run at the same time is one group.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support import changes
from tests.support.docker import containers
from tests.support.servers import serving
from tests.support.turns import Turns, make_folder, remove_folder

# One process builds the image, which is mostly waiting, while the others run unit tests: a mistake
# shows early. Then what has few or long groups, and short ones last, so that all end together.
FOLDERS = ("image", "cluster", "unit", "patches", "e2e", "kernels")
# Of these groups two run at a time (tests/support/turns.py).
COMPUTING = ("image", "cluster", "patches", "e2e", "kernels")
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

NEEDED_BYTES = 6 << 30  # an image, a cache and pytest's folders, all at once

left_out = pytest.StashKey[dict[str, list[str]]]()
seconds = pytest.StashKey[defaultdict[str, float]]()
turns = pytest.StashKey[Turns]()
turns_folder = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")
    parser.addoption("--network", action="store_true", help="also run tests that need the internet")


def pytest_configure(config: pytest.Config) -> None:
    # Tests start hundreds of processes of the same files
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    serving.vllm_cache()
    _check_disk(Path(tempfile.gettempdir()))
    config.stash[left_out] = {}
    config.stash[seconds] = defaultdict(float)
    if (told := getattr(config, "workerinput", None)) is not None:  # one process of several
        config.stash[turns] = Turns(Path(told["turns"]))


def _check_disk(folder: Path) -> None:
    """One clear line instead of tests that fail because nibble refuses a full disk."""
    if (free_bytes := shutil.disk_usage(folder).free) < NEEDED_BYTES:
        pytest.exit(
            f"only {free_bytes >> 20} MiB of disk are free in {folder}; expected"
            f" {NEEDED_BYTES >> 30} GiB; free some (`docker system prune`, old pytest folders)",
            returncode=4,
        )


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
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None):
    """A group that computes keeps its turn from its first test to its last."""
    folder = _folder(item.path)
    turn = item.config.stash.get(turns, None)
    if turn and folder in COMPUTING:
        turn.take()
    began = time.monotonic()
    try:
        return (yield)
    finally:
        item.config.stash[seconds][folder] += time.monotonic() - began
        if turn and (nextitem is None or group(nextitem.nodeid) != group(item.nodeid)):
            turn.give_back()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Before a process starts: where it finds the turns of this run."""
    if turns_folder not in node.config.stash:
        node.config.stash[turns_folder] = make_folder()
    node.workerinput["turns"] = str(node.config.stash[turns_folder])


def pytest_unconfigure(config: pytest.Config) -> None:
    if turns_folder in config.stash:
        remove_folder(config.stash[turns_folder])


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
