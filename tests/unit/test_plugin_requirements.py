"""A vLLM that lacks what nibble's plugin calls, reads or replaces ends the load with one line that
names it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nibble.engine import plugin
from nibble.engine.plugin.require import (
    VllmMismatch,
    names_of_vllm,
    replace,
    required,
    required_of_instances,
)

# --- the helper -----------------------------------------------------------------------------------


class Owner:
    declared: int

    def __init__(self) -> None:
        self.made = 1

    def later(self) -> None:
        self.set_later = self.only_read  # type: ignore[attr-defined]

    def method(self, first: int, second: int = 2, *, third: int = 3) -> None:
        """As vLLM's."""


def test_what_is_there_with_its_signature_is_returned() -> None:
    assert required(Owner, "method") is Owner.method
    assert required(Owner, "method", "self", "first") is Owner.method
    assert required(Owner, "method", "self", "first", "second", "third") is Owner.method


@pytest.mark.parametrize(
    "names", [("self",), ("first", "self"), ("self", "first", "fourth"), ("self", "second")]
)
def test_another_signature_is_named_with_the_one_that_is_expected(names: tuple[str, ...]) -> None:
    with pytest.raises(VllmMismatch) as raised:
        required(Owner, "method", *names)
    line = str(raised.value)
    assert "Owner.method(self, first: 'int', second: 'int' = 2, *, third: 'int' = 3)" in line
    assert f"expected ({', '.join(names)}) of vLLM 0.32.0" in line and "\n" not in line


def test_what_is_absent_is_named() -> None:
    module = ModuleType("vllm.somewhere")
    for owner, called in ((Owner, f"{__name__}.Owner"), (module, "vllm.somewhere")):
        with pytest.raises(VllmMismatch, match=rf"has no {called}\.gone, which nibble's plugin"):
            required(owner, "gone")
        with pytest.raises(VllmMismatch, match="gone"):
            replace(owner, "gone", 1)
        assert not hasattr(owner, "gone")


def test_replacing_returns_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Owner, "method", before := Owner.method)
    assert replace(Owner, "method", None, "self", "first") is before
    assert Owner.method is None


def test_attributes_of_objects_are_declared_or_set_by_a_method() -> None:
    class Child(Owner):
        pass

    required_of_instances(Child, "declared", "made", "set_later", "method")
    for name in ("gone", "only_read"):
        with pytest.raises(VllmMismatch, match=rf"gives no {name} to objects of .*Child"):
            required_of_instances(Child, name)


def test_an_import_of_a_name_that_vllm_lacks_is_named() -> None:
    for error in (
        ImportError("cannot import name 'X' from 'vllm.y' (/x.py)", name="vllm.y"),
        ModuleNotFoundError("No module named 'vllm.z'", name="vllm.z"),
    ):
        with pytest.raises(VllmMismatch, match=str(error).split("(")[0]), names_of_vllm():
            raise error
    with pytest.raises(ImportError, match="No module named 'numpy'"), names_of_vllm():
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")


# --- the plugin with a vLLM that lacks something --------------------------------------------------

VLLM = """
vllm: __path__ = []
vllm.envs: VLLM_MQ_MAX_CHUNK_BYTES_MB = 1
    def is_set(name): return True
vllm.distributed: __path__ = []
vllm.distributed.device_communicators: __path__ = []
vllm.distributed.device_communicators.shm_broadcast:
    class MessageQueue:
        def __init__(self, n_reader, n_local_reader, max_chunk_bytes=0): pass
vllm.v1: __path__ = []
vllm.v1.executor: __path__ = []
vllm.v1.executor.multiproc_executor:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
vllm.v1.core: __path__ = []
vllm.v1.core.sched: __path__ = []
vllm.v1.core.sched.interface:
    class SchedulerInterface:
        def get_num_unfinished_requests(self): pass
vllm.v1.core.sched.output:
    class SchedulerOutput:
        total_num_scheduled_tokens: int
vllm.v1.engine: __path__ = []
    class EngineCoreRequestType:
        UTILITY = 3
vllm.v1.engine.core:
    class EngineCore:
        def __init__(self): self.scheduler = None
        def log_error_detail(self, scheduler_output): pass
        def is_sleeping(self): pass
    class EngineCoreProc(EngineCore):
        def _process_engine_step(self): pass
        def _handle_client_request(self, request_type, request): pass
vllm.v1.engine.output_processor:
    class OutputProcessor:
        def __init__(self, tokenizer): self.request_states = {}
        def add_request(self, request): pass
        def abort_requests(self, request_ids): pass
        def process_outputs(self, outputs): pass
"""


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs VLLM with one thing changed, for this test; modules of the plugin are read anew."""
    before = {
        name: module
        for name, module in sys.modules.items()
        if name.split(".")[0] == "vllm" or name == "nibble.engine.plugin.queues"
    }
    for name in before:
        monkeypatch.delitem(sys.modules, name)

    def install(old: str = "", new: str = "") -> None:
        assert VLLM.count(old) == 1 or not old, old
        sources: dict[str, list[str]] = {}
        for line in (
            VLLM.replace(old, new).strip().splitlines() if old else VLLM.strip().splitlines()
        ):
            if not line.startswith(" "):
                name, _, line = line.partition(":")
                sources[name] = [line.strip()]
            else:
                sources[name].append(line[4:])
        for name, lines in sources.items():
            module = ModuleType(name)
            monkeypatch.setitem(sys.modules, name, module)
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, module)
            exec("\n".join(lines), vars(module))

    yield install
    sys.modules.pop("nibble.engine.plugin.queues", None)
    vars(plugin).pop("queues", None)


def load(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The parts of the plugin that need nothing but these modules."""
    from nibble.engine.plugin import pulse

    monkeypatch.setenv("NIBBLE_PULSE", str(folder))
    monkeypatch.setattr(pulse, "_arm", lambda folder: None)
    pulse.register.__wrapped__()
    importlib.import_module("nibble.engine.plugin.queues").size_answer_queue()
    queue: Any = sys.modules["vllm.v1.executor.multiproc_executor"]
    queue.MessageQueue(1, 1)  # reads the variable


def test_the_plugin_loads_with_a_vllm_that_has_all(
    fake_vllm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_vllm()
    own = sys.modules["vllm.v1.executor.multiproc_executor"].MessageQueue  # type: ignore[attr-defined]
    load(monkeypatch, tmp_path)
    module: Any = sys.modules["vllm.v1.executor.multiproc_executor"]
    assert module.MessageQueue is not own and issubclass(module.MessageQueue, own)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("def _process_engine_step", "def step", r"has no .*EngineCoreProc\._process_engine_step"),
        ("_process_engine_step(self)", "_process_engine_step(self, budget)",
         r"_process_engine_step\(self, budget\), .* expected \(self\)"),
        ("(self, request_type, request)", "(self, request)", r"_handle_client_request\(self, req"),
        ("def log_error_detail", "def log_error", r"EngineCore\.log_error_detail"),
        ("def is_sleeping", "def sleeps", r"EngineCore\.is_sleeping"),
        ("self.scheduler = None", "pass", "gives no scheduler to objects of .*EngineCore"),
        ("get_num_unfinished_requests", "count", r"SchedulerInterface\.get_num_unfinished"),
        ("total_num_scheduled_tokens", "tokens", "gives no total_num_scheduled_tokens"),
        ("UTILITY", "CALL", r"EngineCoreRequestType\.UTILITY"),
        ("class OutputProcessor", "class Outputs", "cannot import name 'OutputProcessor'"),
        ("self.request_states = {}", "pass", "gives no request_states"),
        ("def abort_requests", "def abort", r"OutputProcessor\.abort_requests"),
        ("    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue",
         "    import vllm", r"multiproc_executor\.MessageQueue"),
        ("max_chunk_bytes=0", "max_bytes=0", r"MessageQueue\.__init__\(self, n_reader"),
        ("VLLM_MQ_MAX_CHUNK_BYTES_MB", "CHUNK_MB", r"vllm\.envs\.VLLM_MQ_MAX_CHUNK_BYTES_MB"),
        ("def is_set", "def has", r"vllm\.envs\.is_set"),
    ],
)  # fmt: skip
def test_the_plugin_ends_the_load_and_names_what_is_missing(
    old: str,
    new: str,
    named: str,
    fake_vllm: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    fake_vllm(old, new)
    with pytest.raises(VllmMismatch, match=named) as raised:
        load(monkeypatch, tmp_path)
    assert "\n" not in str(raised.value) and "which nibble's plugin needs" in str(raised.value)


def test_an_error_of_the_plugin_ends_vllms_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes from `register`, which vLLM calls, and not from its import, whose errors vLLM only
    logs (vllm 0.32 plugins/__init__.py:71).
    """
    monkeypatch.setattr(plugin, "has_operators", lambda: True)
    for name in ("vllm", "vllm.model_executor.layers.quantization"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "nibble.engine.plugin.install", raising=False)
    with pytest.raises(VllmMismatch, match="lacks what the plugin imports: import of vllm"):
        plugin.register.__wrapped__()


def test_without_operators_the_plugin_leaves_vllm_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "vllm.model_executor", None)  # an import of it fails
    plugin.register.__wrapped__()
    assert caplog.messages == ["nibble-kernels is not installed: nibble's plugin does nothing"]
