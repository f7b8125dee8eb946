"""The memory bandwidth of the CPU's cores: measured, kept, and used by plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from nibble.machine.cpus import ComputeCores
from nibble.machine.hardware import detect
from nibble.machine.read_bandwidth import measure_and_store, read_bandwidth, stored_bandwidth
from nibble.plan.gather import plan_for, read_wishes
from tests.support.models.tiny_model import write_model

MODULE = "nibble.machine.read_bandwidth"
CORES = ComputeCores((0, 1), 2, "2 physical cores")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "NIBBLE_CACHE_DIR": str(tmp_path), "NIBBLE_TARGET": "cpu"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}._BYTES", 4 << 20)


def test_what_was_read_is_plausible() -> None:
    assert 1e8 < read_bandwidth(1) < 1e13
    assert 1e8 < read_bandwidth(3) < 1e13


def test_a_measurement_is_kept_for_the_cores_it_was_made_on(environ: dict[str, str]) -> None:
    assert stored_bandwidth(CORES, environ) is None
    found = measure_and_store(CORES, environ)
    assert stored_bandwidth(CORES, environ) == pytest.approx(found, abs=1)
    for other in (ComputeCores((0,), 2, ""), ComputeCores((0, 1), 1, "")):
        assert stored_bandwidth(other, environ) is None


def test_a_measurement_beside_other_programs_does_not_lower_it(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for found in (3e9, 9e9, 4e9):
        monkeypatch.setattr(f"{MODULE}.read_bandwidth", lambda threads, found=found: found)
        measure_and_store(CORES, environ)
    assert stored_bandwidth(CORES, environ) == 9e9


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cpus": [0, 1], "threads": 2}', "\xff"])
def test_a_damaged_file_is_no_measurement(environ: dict[str, str], text: str) -> None:
    (Path(environ["NIBBLE_CACHE_DIR"]) / "read_bandwidth.json").write_bytes(text.encode("latin-1"))
    assert stored_bandwidth(CORES, environ) is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert measure_and_store(CORES, {"NIBBLE_CACHE_DIR": str(tmp_path / "file/below")}) > 0


def test_a_plan_on_the_cpu_has_a_bound_once_it_is_measured(
    environ: dict[str, str], tmp_path: Path
) -> None:
    model = str(write_model(tmp_path / "m"))
    assert "until a server starts" in plan_for(read_wishes([model], environ)).bound.note
    compute = detect(environ).compute
    assert compute is not None
    found = measure_and_store(compute, environ)
    bound = plan_for(read_wishes([model], environ)).bound
    assert bound.bytes_per_step and bound.tokens_per_s == pytest.approx(
        found / bound.bytes_per_step, rel=1e-6
    )
    assert "measured at a start" in bound.note
