"""Doctor: known-bad versions, FlashInfer's compiler, compiled code, NCCL, clocks, limits, a
start of a model.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from nibble.cli.doctor.machine import (
    jit_check,
    judge_entries,
    known_bad_checks,
    limit_checks,
    model_checks,
    nccl_check,
    peer_check,
)
from nibble.machine.gpu_state import GpuState, describe, problem
from nibble.machine.hardware import Gpu, Hardware
from nibble.machine.targets import load_target
from nibble.plan.compile_cache import CacheKey, CachePlan
from nibble.serve.compile_cache import Use, entries
from tests.support.models.tiny_model import write_model

HOST = Hardware((), None, None, "x86_64", 8, frozenset({"avx2"}), 16 << 30, 12 << 30)
CARD = Gpu(0, "RTX PRO 6000 Blackwell", (12, 0), 95 << 30, 94 << 30, "GPU-0")
IDLE = GpuState(0, 8, 210, 1980, 70.0, 700.0, 30, 0, 0x1)


def test_a_known_bad_kernel_is_a_warning_and_a_known_bad_package_fails() -> None:
    gb10 = load_target("gb10")
    (kernel,) = known_bad_checks(gb10, {}, "7.0.0-1019-nvidia")
    assert kernel.status == "warning" and "eugr#392" not in kernel.fix and "#392" in kernel.what
    (package,) = known_bad_checks(gb10, {"flashinfer-python": "0.6.17"}, "6.14.0")
    assert package.status == "fail" and "flashinfer-ai/flashinfer#4486" in package.what
    (sound,) = known_bad_checks(gb10, {"flashinfer-python": "0.7.0.post1"}, "6.14.0")
    assert sound.status == "ok"
    assert (
        known_bad_checks(load_target("cpu"), {"flashinfer-python": "0.6.17"}, "7.0.0-1019")[
            0
        ].status
        == "ok"
    )


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    for name, text in (
        ("nvcc", "echo 'Cuda compilation tools, release 12.8, V12.8.9'"),
        ("ninja", "true"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def test_flashinfers_compiler_is_looked_for_and_must_know_the_gpu(tools: Path) -> None:
    here = {"PATH": f"{tools}:/usr/bin:/bin"}
    assert jit_check(load_target("hopper"), here).what == "nvcc 12.8 and ninja are installed"
    old = jit_check(load_target("sm120"), here)
    assert old.status == "warning" and "cannot compile for sm120" in old.what
    none = jit_check(load_target("hopper"), {"PATH": "/nowhere", "CUDA_HOME": "/nowhere"})
    assert none.status == "warning" and "12.9" in none.fix
    assert jit_check(load_target("cpu"), {}).status == "ok"
    (tools / "nvcc").write_bytes(b"\x7fELF of another architecture")
    assert "unknown version" in jit_check(load_target("hopper"), here).what


def test_damaged_and_stale_compiled_code_is_named_with_its_command(tmp_path: Path) -> None:
    keys = tuple(CacheKey(kind, {"build": "b1"}) for kind in ("kernels", "graphs"))  # type: ignore[arg-type]
    caches = CachePlan(tmp_path, keys)
    use = Use(caches, print)
    use.open()
    file = caches.folder("graphs") / "vllm" / "graph.so"
    file.write_bytes(b"x" * 100)
    use.record()
    use.close()
    sound = judge_entries(entries(tmp_path), "b1")
    assert sound.status == "ok" and sound.what.startswith("2 entries")
    stale = judge_entries(
        [replace(entry, size_bytes=30 << 30) for entry in entries(tmp_path)], "b2"
    )
    assert stale.status == "warning" and "--all-but-current" in stale.fix
    file.write_bytes(b"x")
    broken = judge_entries(entries(tmp_path), "b1")
    assert (
        broken.status == "warning"
        and "1 bytes instead of 100" in broken.what
        and "cache verify" in broken.fix
    )


def test_the_nccl_that_would_be_loaded_is_named(tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"")
    two = replace(HOST, gpus=(CARD, replace(CARD, index=1)))
    found = nccl_check(two, {"VLLM_NCCL_SO_PATH": str(library)})
    assert (found.status, found.what) == ("ok", f"{library} (VLLM_NCCL_SO_PATH)")
    first = nccl_check(
        two, {"VLLM_NCCL_SO_PATH": "/x/libnccl.so", "LD_PRELOAD": f"/lib/other.so:{library}"}
    )
    assert first.what == f"{library} (LD_PRELOAD)"
    assert nccl_check(two, {"VLLM_NCCL_SO_PATH": "/x/libnccl.so"}).status == "fail"


def test_several_sm120_cards_are_warned_of_hanging_peers() -> None:
    target, two = load_target("sm120"), replace(HOST, gpus=(CARD, replace(CARD, index=1)))
    assert "NCCL_P2P_DISABLE=1" in peer_check(target, two, {})[0].fix
    assert peer_check(target, two, {"NCCL_P2P_DISABLE": "1"}) == []
    assert peer_check(target, replace(HOST, gpus=(CARD,)), {}) == []


def test_clocks_that_hold_a_gpu_back_are_told_apart_from_an_idle_one() -> None:
    assert problem(IDLE) is None
    assert describe(IDLE) == "GPU 0: P8, 210 of 1980 MHz, 70 of 700 W, 30 C"
    stuck = problem(replace(IDLE, busy_percent=99))
    assert stuck and "low-power state P8" in stuck[0] and "restart" in stuck[1]
    hot = problem(replace(IDLE, performance_state=0, throttled_by=0x40 | 0x4))
    assert hot and "thermal slowdown by the hardware" in hot[0]
    assert (
        describe(GpuState(1, None, None, None, None, None, None, None, 0))
        == "GPU 1: NVML reports nothing"
    )


def test_limits_of_the_container_are_read_and_judged(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "pids.max").write_text("100\n")
    found = {check.name: check for check in limit_checks(1, tmp_path)}
    assert (found["cpu limit"].status, found["cpu limit"].what) == ("warning", "1.5 cores")
    assert found["processes"].status == "warning" and "--pids-limit" in found["processes"].fix
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "pids.max").write_text("max\n")
    assert [check.name for check in limit_checks(1, tmp_path)] == ["locked memory"]


def test_a_start_of_a_model_is_tried_up_to_vllm(tmp_path: Path) -> None:
    environ = {
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
        "NIBBLE_TARGET": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    model = write_model(tmp_path / "m")
    ok = model_checks(str(model), environ)
    assert ok[0].status == "ok" and "on cpu" in ok[0].what
    assert not list((tmp_path / ".cache" / "nibble").glob("engine/*"))  # a look makes no entries
    (model / "model.safetensors").unlink()
    assert model_checks(str(model), environ)[0].status == "fail"
    assert "nothing-here" in model_checks(str(tmp_path / "nothing-here"), environ)[0].what


def test_a_model_that_is_not_here_and_cannot_be_asked_for_is_no_start_that_would_begin(
    tmp_path: Path,
) -> None:
    environ = {
        "HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "NIBBLE_TARGET": "cpu",
        "PATH": os.environ["PATH"],
    }
    (check,) = model_checks("acme/absent", environ)
    assert (
        check.status == "warning"
        and "unknown until pull" in check.what
        and "nibble pull" in check.fix
    )
