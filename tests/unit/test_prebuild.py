"""FlashInfer's sampling kernels are compiled beside the load where the engine would compile them
after it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nibble.machine.hardware import Hardware
from nibble.plan import gather as prepare
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from nibble.serve import prebuild
from nibble.serve.prebuild import compiler_environ, prebuilding, should_prebuild
from tests.support.hardware import GIB, H200, HOPPER, SPARK


@pytest.fixture
def tools(tmp_path: Path) -> str:
    """A PATH with what FlashInfer compiles with."""
    for name in ("nvcc", "ninja"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    return str(tmp_path / "bin")


def planned(monkeypatch: pytest.MonkeyPatch, here: Hardware) -> Plan:
    monkeypatch.setattr(prepare, "detect", lambda environ: here)
    return plan_for(read_wishes(["nibble-demo-nvfp4"], {"HOME": "/home/me", "HF_HUB_OFFLINE": "1"}))


def test_a_first_start_on_a_discrete_gpu_compiles_and_a_later_one_does_not(
    monkeypatch: pytest.MonkeyPatch, tools: str, tmp_path: Path
) -> None:
    plan = planned(monkeypatch, HOPPER)
    child = {"PATH": tools, "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    assert should_prebuild(plan, child)
    module = tmp_path / ".cache/flashinfer/0.7.0.post1/90a/cached_ops/sampling/sampling.so"
    module.parent.mkdir(parents=True)
    module.write_bytes(b"")
    assert not should_prebuild(plan, child)


@pytest.mark.parametrize(
    ("here", "more"),
    [
        (SPARK, {}),
        (replace(HOPPER, gpus=()), {}),
        (replace(HOPPER, memory_available_bytes=8 * GIB), {}),
        (HOPPER, {"VLLM_USE_FLASHINFER_SAMPLER": "0"}),
        (HOPPER, {"PATH": "/nowhere", "CUDA_HOME": "/nowhere"}),
    ],
)
def test_nothing_is_compiled_where_it_would_harm_or_nobody_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
    tools: str,
    tmp_path: Path,
    here: Hardware,
    more: dict[str, str],
) -> None:
    plan = planned(monkeypatch, here)
    assert not should_prebuild(
        plan, {"PATH": tools, "FLASHINFER_WORKSPACE_BASE": str(tmp_path), **more}
    )


def test_nothing_is_compiled_in_an_image_that_has_them(
    monkeypatch: pytest.MonkeyPatch, tools: str, tmp_path: Path
) -> None:
    package = tmp_path / "site/flashinfer"
    for file in ("__init__.py", "data/aot/sampling/sampling.so"):
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_bytes(b"")
    plan = planned(monkeypatch, HOPPER)
    child = {"PATH": tools, "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    assert should_prebuild(plan, child)
    monkeypatch.syspath_prepend(str(package.parent))
    assert not should_prebuild(plan, child)


@pytest.mark.parametrize(
    ("capability", "arch"), [((9, 0), "9.0a"), ((10, 3), "10.3a"), ((12, 0), "12.0f")]
)
def test_the_compiler_sees_no_gpu_and_is_told_its_architecture(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: str
) -> None:
    plan = planned(monkeypatch, replace(HOPPER, gpus=(replace(H200, capability=capability),)))
    environ = compiler_environ(plan, {"CUDA_VISIBLE_DEVICES": "0"})
    assert (environ["FLASHINFER_CUDA_ARCH_LIST"], environ["CUDA_VISIBLE_DEVICES"]) == (arch, "")
    assert (
        compiler_environ(plan, {"FLASHINFER_CUDA_ARCH_LIST": "9.0"})["FLASHINFER_CUDA_ARCH_LIST"]
        == "9.0"
    )


def test_compilers_end_with_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = planned(monkeypatch, HOPPER)
    told = tmp_path / "pid"
    program = (
        f"import subprocess; c = subprocess.Popen(['sleep', '60']); open({str(told)!r},"
        " 'w').write(f'{c.pid} ');"
    )
    monkeypatch.setattr(prebuild, "_COMPILE", f"{program} c.wait()")
    monkeypatch.setattr(prebuild, "should_prebuild", lambda plan, child: True)
    with prebuilding(plan, {"PATH": os.environ["PATH"]}) as compiles:
        assert compiles
        wait_for(lambda: told.exists() and told.read_text().endswith(" "))
        nvcc = Path("/proc", told.read_text().strip(), "stat")
        assert nvcc.exists()
    wait_for(lambda: not nvcc.exists() or nvcc.read_text().rpartition(") ")[2].startswith("Z"))


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)
