"""`nibble selftest` on simulated machines: findings, exit codes, the table and the report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nibble.cli import selftest as module
from nibble.cli.app import app
from nibble.cli.doctor.trials import check_record
from nibble.cli.selftest import show_report, verdict_line
from nibble.errors import ExitCode, NibbleError
from nibble.machine.gpu_state import GpuState
from nibble.machine.gpu_users import GpuUse, in_use
from nibble.machine.hardware import Hardware
from nibble.trials.record import Record, open_record
from nibble.trials.report import Place, Report, read_report
from nibble.trials.trial import Outcome, Trial
from tests.support.hardware import CPU_HOST, HOPPER, SPARK

ADA = replace(HOPPER, gpus=(replace(HOPPER.gpus[0], name="NVIDIA L40S", capability=(8, 9)),))
OLD = replace(HOPPER, driver="550.54", cuda_driver="12.4")
IDLE = GpuUse(0, 0, 1 << 20, 0)
COOL = GpuState(0, 0, 1980, 1980, 120.0, 700.0, 40, 0, 0)


class Machine:
    """This machine as another one, on which every trial has the outcome of `verdicts`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.trials, self.verdicts = folder, list[Trial](), dict[str, Any]()
        self._set = lambda name, value: monkeypatch.setattr(module, name, value)
        self._set("run_trials", self._run)
        self._set("torch_cuda", lambda: "13.0")

    def is_(self, hardware: Hardware, use: GpuUse = IDLE, state: GpuState = COOL) -> None:
        self._set("detect", lambda environ: hardware)
        self._set("gpu_uses", lambda indices: [use])
        self._set("gpu_states", lambda indices: [state])

    def _run(self, trials: Any, environ: Any, **rest: Any) -> list[Outcome]:
        self.trials = list(trials)
        return [
            Outcome(trial.name, self.verdicts.get(trial.name, "right"), ran=trial.name)
            for trial in trials
        ]

    def selftest(self, *plants: str) -> Report:
        return module.selftest({"NIBBLE_CACHE_DIR": str(self.folder)}, plants)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_healthy_gpu_passes_and_its_results_are_kept_for_plans(machine: Machine) -> None:
    machine.is_(HOPPER)
    report = machine.selftest()
    assert report.exit_code == 0 and not report.findings
    names = {trial.name for trial in machine.trials}
    assert {"decode", "warpgroup", "w4a4", "fp8", "e4m3", "sparse", "experts"} <= names
    assert "w4a4-experts" in names
    assert {"vllm:auto:bf16", "vllm:humming:bf16"} <= names
    kept = open_record(machine.folder, report.place, print)
    assert kept.outcomes.keys() == names and report.states[0].startswith("GPU 0: P0, 1980")
    assert report.memory["gpu_free_bytes"] == HOPPER.gpus[0].memory_free_bytes


@pytest.mark.parametrize("verdict", ["wrong", "hung", "crashed", "not finite"])
def test_a_fault_in_a_plans_kernel_ends_with_8_and_in_another_one_does_not(
    machine: Machine, verdict: str
) -> None:
    machine.is_(HOPPER)
    machine.verdicts = {"experts": verdict}
    report = machine.selftest()
    assert report.exit_code == 0 and "no plan uses them: experts" in verdict_line(report)
    machine.verdicts |= {"decode": verdict}
    report = machine.selftest()
    assert report.exit_code is ExitCode.CANARY and report.wrong == ("decode",)
    assert verdict_line(report).endswith("faulty kernels: decode (exit 8)")
    machine.verdicts = {"e4m3": verdict}
    assert machine.selftest().wrong == ("e4m3",)
    machine.is_(SPARK)
    assert machine.selftest().exit_code == 0  # nibble's kernels are not the default there


def test_an_unknown_gpu_is_named_and_the_cpu_tested(machine: Machine) -> None:
    machine.is_(ADA)
    report = machine.selftest()
    assert report.exit_code is ExitCode.NO_HARDWARE and report.place.target == "cpu"
    assert "NVIDIA L40S (compute capability 8.9) is a GPU that nibble does not know" in (
        report.findings[0].what
    )


def test_an_old_driver_is_named_and_no_kernel_starts(machine: Machine) -> None:
    machine.is_(OLD)
    report = machine.selftest()
    assert report.exit_code is ExitCode.NO_HARDWARE and not machine.trials
    expected = "driver 550.54 is for CUDA 12.4, and torch is built for CUDA 13.0"
    assert report.findings[0].what == expected


def test_a_driver_that_the_target_names_is_a_finding(machine: Machine) -> None:
    machine.is_(replace(SPARK, driver="590.44"))
    report = machine.selftest()
    assert report.exit_code is ExitCode.NO_HARDWARE
    assert "deadlocks in CUDA graph capture" in report.findings[0].what


def test_a_gpu_in_use_and_a_hot_one_are_named(machine: Machine) -> None:
    machine.is_(HOPPER, GpuUse(0, 2, 12 << 30, 97), replace(COOL, throttled_by=0x40))
    report = machine.selftest()
    assert report.exit_code == 0
    assert [finding.what for finding in report.findings] == [
        "GPU 0 is in use: 2 processes, 12.0 GiB, 97 % busy",
        "GPU 0 is slowed down: thermal slowdown by the hardware",
    ]
    assert in_use(GpuUse(1, None, None, None)) == ""


def test_planted_faults_reach_their_trials_and_are_not_kept(machine: Machine) -> None:
    machine.is_(HOPPER)
    faults = {"decode": "hang", "vllm:auto:bf16": "crash", "w4a4": "nan", "w4a4-experts": "wrong"}
    report = machine.selftest(*(f"{name}={fault}" for name, fault in faults.items()))
    assert {trial.name: trial.plant for trial in machine.trials if trial.plant} == faults
    assert not open_record(machine.folder, report.place, print).outcomes


@pytest.mark.parametrize("word", ["decode", "decode=slow", "=hang", "nothing=hang"])
def test_a_fault_that_is_none_is_refused(machine: Machine, word: str) -> None:
    machine.is_(HOPPER)
    with pytest.raises(NibbleError) as refused:
        machine.selftest(word)
    assert refused.value.code is ExitCode.USAGE


def test_without_a_gpu_a_targets_kernels_are_not_tried(machine: Machine) -> None:
    machine.is_(CPU_HOST)
    with pytest.raises(NibbleError) as refused:
        module.selftest({"NIBBLE_CACHE_DIR": str(machine.folder), "NIBBLE_TARGET": "gb10"})
    assert refused.value.code is ExitCode.NO_HARDWARE
    assert "--gpus all" in refused.value.line()
    assert not machine.trials


def test_the_report_has_no_name_of_machine_user_or_gpu(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.is_(HOPPER)
    report = machine.selftest()
    module.write_report(report, tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert HOPPER.gpus[0].uuid not in text and str(tmp_path) not in text
    assert read_report(tmp_path / "report.json")[0] == report
    show_report(report)
    shown = capsys.readouterr().out
    assert "NVIDIA H200 (hopper), driver 580.105.08, CUDA 13.0" in shown and "decode" in shown
    with pytest.raises(NibbleError, match="cannot be written"):
        module.write_report(report, tmp_path / "no" / "report.json")


def test_the_command_really_tests_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "detect", lambda environ: CPU_HOST)
    monkeypatch.setenv("NIBBLE_CACHE_DIR", str(tmp_path))
    words = ["selftest", "--only", "head", "--only", "conversions", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0
    trials = json.loads(done.stdout[done.stdout.index("{") :])["trials"]
    assert [trial["verdict"] for trial in trials] == ["right", "right"]
    done = CliRunner().invoke(app, [*words, "--plant", "head=crash"])
    assert done.exit_code == ExitCode.CANARY


def test_doctor_offers_it_and_shows_faults(tmp_path: Path) -> None:
    empty = Record(Place("cpu", "x", 0, "", "", "a", "b"))
    offered = check_record(empty)
    assert offered.status == "ok" and "`nibble selftest` takes" in offered.what
    right = empty.with_outcomes([Outcome("decode", "right"), Outcome("links", "refused")])
    assert check_record(right).what == "1 kernels and measurements are right on this device"
    faulty = check_record(right.with_outcomes([Outcome("experts", "hung", "no end")]))
    assert faulty.status == "warning" and "experts: hung (no end)" in faulty.what
