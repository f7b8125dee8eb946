"""Trials: a kernel that hangs, crashes, is wrong or returns NaN costs its process and is named."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from nibble.errors import ExitCode, NibbleError
from nibble.machine.targets import TARGET_NAMES, load_target
from nibble.trials import run as run_module
from nibble.trials import trial as trial_module
from nibble.trials.catalog import (
    CPU_LEVELS,
    OUR_PARTS,
    OURS,
    selftest_trials,
    used_by_plans,
    wrong_in_a_plan,
)
from nibble.trials.choose import E4M3, Use, choose, mean_ratio, right_backend, summary, times_of
from nibble.trials.record import Record, ShapeTimes, open_record
from nibble.trials.report import Place, Report, parse_report, read_report
from nibble.trials.run import environment, run_trials
from nibble.trials.trial import Fault, Outcome, Trial, Verdict

PLACE = Place("hopper", "NVIDIA H200", 1, "580.1", "13.0", "abc", "def")
HEAD = Trial("head", "head", "head", "cpu", ((96, 64),), (1, 9))


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (trial_module, run_module):
        monkeypatch.setattr(module, "PHASE_LIMITS", {"start": 60.0, "prepare": 30.0, "run": 1.0})


def run(*trials: Trial, **rest: Any) -> list[Outcome]:
    return run_trials(trials, dict(os.environ), **rest)


def test_each_planted_fault_is_named_and_the_rest_goes_on(short_limits: None) -> None:
    faults: dict[Fault, Verdict] = {
        "hang": "hung",
        "wrong": "wrong",
        "nan": "not finite",
        "crash": "crashed",
    }
    trials = [replace(HEAD, name=fault, plant=fault) for fault in faults]
    outcomes = run(*trials, HEAD, at_once=2)
    assert [outcome.verdict for outcome in outcomes] == [*faults.values(), "right"]
    hung, wrong, _, crashed, right = outcomes
    assert hung.line() == "hang: hung (multiplying 96x64 with 1 rows did not end within 1 s)"
    assert "off by" in wrong.detail or "in place of" in wrong.detail
    assert "ended its process with signal 11" in crashed.detail
    assert right.error is not None and right.error < 0.005


def test_a_killed_process_and_what_it_started_are_gone(short_limits: None) -> None:
    began = time.monotonic()
    run(replace(HEAD, plant="hang"))
    assert time.monotonic() - began < 30
    words: list[str] = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # a zombie that another test left
            words += child.cmdline()
    assert "nibble.trials.worker" not in words


def test_time_that_is_over_is_no_fault_of_a_kernel() -> None:
    late, outcome = run(HEAD, until=time.monotonic() - 1)[0], run(HEAD, work_s=1e-6)[0]
    for each in (late, outcome):
        assert each.verdict in ("not run", "right") and not each.is_fault
    assert late.detail == "no time was left"


def test_a_process_that_answers_nonsense_crashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module.sys, "executable", "/bin/echo")
    outcome = run(HEAD)[0]
    assert outcome.verdict == "crashed" and "cannot be read" in outcome.detail


def test_a_trials_process_gets_no_secret() -> None:
    given = {"HF_TOKEN": "hf_x", "VLLM_API_KEY": "k", "AWS_SECRET_ACCESS_KEY": "s", "PATH": "/bin"}
    found = environment(HEAD, given)
    assert not given.keys() - {"PATH"} & found.keys() and found["PATH"] == "/bin"
    assert found["CUDA_VISIBLE_DEVICES"] == ""


# --- which kernels a plan would use ---


def outcome(name: str, verdict: Verdict = "right", **rest: Any) -> Outcome:
    return Outcome(name, verdict, ran=rest.pop("ran", name), **rest)


@pytest.mark.parametrize("name", TARGET_NAMES)
def test_every_target_has_trials_of_distinct_names(name: str) -> None:
    trials = selftest_trials(load_target(name), 2)
    names = [trial.name for trial in trials]
    assert len(names) == len(set(names)) and {"conversions", "bandwidth"} <= set(names)
    for trial in trials:
        assert Trial.from_json(json.loads(json.dumps(trial.to_json()))) == trial
        for rows, columns in trial.shapes if trial.task == "linear" else ():
            assert rows % 8 == 0 and columns % 16 == 0
    assert ("links" in names) == (name != "cpu")


@pytest.mark.parametrize("name", TARGET_NAMES)
def test_every_kernel_in_a_targets_file_is_tried(name: str) -> None:
    target = load_target(name)
    tried = " ".join(trial.name for trial in selftest_trials(target, 1)).replace("_", "")
    for kernel in target.expected["linear"]:
        backend = kernel.removesuffix("NvFp4LinearKernel").lower()
        assert kernel.startswith(("Nibble", "Cpu")) or backend in tried


def test_the_best_instructions_of_a_cpu_are_a_plans() -> None:
    cpu = load_target("cpu")
    ran = {f"cpu:{level}:{form}": level for level in CPU_LEVELS[:4] for form in ("bf16", "fp4")}
    used = used_by_plans(cpu, [*ran, "head", "bandwidth"], ran)
    assert used == {"cpu:avx512:bf16", "cpu:avx512:fp4", "head"}
    slower = [outcome("cpu:avx2:bf16", "wrong"), outcome("cpu:avx512:bf16")]
    assert wrong_in_a_plan(cpu, slower) == ()
    best = [outcome("cpu:avx2:bf16"), outcome("cpu:avx512:bf16", "crashed", ran="")]
    assert wrong_in_a_plan(cpu, best) == (best[1],)


def test_nibbles_kernels_are_a_plans_only_where_they_are_the_default() -> None:
    found = [outcome("decode", "hung"), outcome("vllm:auto:bf16"), outcome("experts", "wrong")]
    assert wrong_in_a_plan(load_target("hopper"), found) == (found[0],)
    assert wrong_in_a_plan(load_target("gb10"), found) == ()
    theirs = [outcome("vllm:auto:bf16", "wrong")]
    assert wrong_in_a_plan(load_target("gb10"), theirs) == tuple(theirs)


# --- the choice for each shape ---

USES = (Use((4096, 4096), 36), Use((4096, 14336), 36))


def times(nibble: float, vllm: float, *rows: int) -> ShapeTimes:
    kept = rows or (1, 2, 4, 8, 16, 32, 64, 2048)
    return ShapeTimes(
        {str(each): nibble for each in kept}, {str(each): vllm for each in kept}, "Marlin"
    )


def record(*outcomes: Outcome, **shapes: ShapeTimes) -> Record:
    keyed = {f"{name.strip('_')} bf16": value for name, value in shapes.items()}
    return Record(PLACE).with_outcomes(outcomes).with_shapes(keyed)


BOTH = (outcome(OURS), outcome("vllm:auto:bf16"))


def kernels(found: Record, default: Any = "vllm", most_rows: int = 256) -> list[str]:
    return [choice.kernel for choice in choose(USES, found, default, most_rows)]


def test_each_shape_gets_the_faster_kernel() -> None:
    found = record(*BOTH, _4096x4096=times(5, 10), _4096x14336=times(11, 10))
    choices = choose(USES, found, "vllm", 256)
    assert [choice.kernel for choice in choices] == ["nibble", "vllm"]
    assert summary(choices) == (
        "nibble's for 1 of 2 shapes (0.50 to 0.50 of vLLM's time); vLLM's for 4096x14336 (1.10)"
    )
    data = choices[0].to_json()
    assert data["nibble_us"]["16"] == 5 and data["vllm_us"]["16"] == 10


def test_only_rows_that_a_server_reaches_count() -> None:
    few = times(5, 10, 1, 2, 4)
    many = {"8": 40.0, "16": 40.0, "32": 40.0, "64": 40.0}
    mixed = ShapeTimes({**few.nibble, **many}, {**few.vllm, **dict.fromkeys(many, 10.0)})
    assert mean_ratio(mixed, 4) == pytest.approx(0.5)
    assert mean_ratio(mixed, 256) == pytest.approx((0.5**3 * 4**4) ** (1 / 7))
    assert mean_ratio(ShapeTimes(), 4) is None


@pytest.mark.parametrize("verdict", ["wrong", "hung", "crashed", "not finite"])
def test_a_kernel_with_a_fault_gets_no_layer_however_fast(verdict: Verdict) -> None:
    fast = {"_4096x4096": times(1, 10), "_4096x14336": times(1, 10)}
    ours = record(outcome(OURS, verdict), BOTH[1], **fast)
    assert kernels(ours, "nibble") == ["vllm", "vllm"]
    assert choose(USES, ours, "nibble", 1)[0].why == f"nibble: {verdict}"
    part = record(*BOTH, outcome(OUR_PARTS[0], verdict), **fast)
    assert kernels(part, "nibble") == ["vllm", "vllm"]
    slow = {"_4096x4096": times(10, 1), "_4096x14336": times(10, 1)}
    theirs = record(BOTH[0], outcome("vllm:auto:bf16", verdict), **slow)
    assert kernels(theirs) == ["nibble", "nibble"]


def test_without_times_the_default_stays() -> None:
    for default in ("nibble", "vllm"):
        assert kernels(record(*BOTH), default) == [default, default]
        assert kernels(record(), default) == [default, default]


@pytest.mark.parametrize(
    ("layers", "kernel"), [((1, 1), "vllm"), ((9, 1), "nibble"), ((1, 9), "vllm")]
)
def test_fp8_layers_have_the_kernel_that_takes_less_time_for_all_of_them(
    layers: tuple[int, int], kernel: str
) -> None:
    """A shape that is not measured has it too."""
    fast, slow = layers
    uses = [Use((96, 64), fast, "fp8"), Use((64, 64), slow, "fp8"), Use((32, 64), 1, "fp8")]
    shapes = {"96x64 fp8": times(9, 10), "64x64 fp8": times(15, 10)}
    found = replace(record(outcome("e4m3")), shapes=shapes)
    assert [each.kernel for each in choose(uses, found, "vllm", 4, E4M3)] == [kernel] * 3
    none = replace(found, shapes={})
    assert {each.why for each in choose(uses, none, "nibble", 4, E4M3)} == {"not measured here"}


def test_another_backend_of_vllms_replaces_a_wrong_one() -> None:
    found = record(
        outcome("vllm:auto:fp4", "wrong"),
        outcome("vllm:flashinfer_cutlass:fp4", "hung"),
        outcome("vllm:marlin:bf16"),
    )
    assert right_backend(found, "fp4") == "marlin"
    assert right_backend(record(outcome("vllm:marlin:bf16", "crashed")), "bf16") == ""


def test_times_of_a_kernel_whose_turn_did_not_come_say_nothing() -> None:
    ours = replace(BOTH[0], times={"4096x4096": {"1": 5.0}})
    found = times_of(USES, ours, {"bf16": BOTH[1]})
    assert {name: mean_ratio(each, 1) for name, each in found.items()} == {
        "4096x4096 bf16": None,
        "4096x14336 bf16": None,
    }


# --- the record ---


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    said: list[str] = []
    first = open_record(tmp_path, PLACE, said.append)
    full = first.with_outcomes(BOTH).with_shapes({"4096x4096 bf16": times(5, 10)})
    full.save(said.append)
    assert open_record(tmp_path, PLACE, said.append) == full and not said
    for other in ({"driver": "590.1"}, {"compiled": "new"}, {"device": "NVIDIA H100"}):
        assert not open_record(tmp_path, replace(PLACE, **other), said.append).outcomes
    assert not said


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"format": 0}', '{"format": 1, "place": {}}'], ids=repr
)
def test_a_corrupt_record_is_dropped_with_one_line(tmp_path: Path, text: str) -> None:
    said: list[str] = []
    path = open_record(tmp_path, PLACE, said.append).path
    assert path is not None
    path.parent.mkdir()
    path.write_text(text)
    assert open_record(tmp_path, PLACE, said.append).outcomes == {}
    assert len(said) == 1 and said[0].startswith(f"dropped {path}: ") and "\n" not in said[0]


@pytest.mark.parametrize(
    "entry",
    [
        {"nibble": {"1": -5.0}, "vllm": {}, "vllm_kernel": ""},
        {"nibble": {"1": float("nan")}, "vllm": {}, "vllm_kernel": ""},
        {"nibble": {"one": 5.0}, "vllm": {}, "vllm_kernel": ""},
        {"nibble": 5},
        {},
        None,
    ],
    ids=repr,
)
def test_a_corrupt_entry_is_dropped_and_the_others_stay(tmp_path: Path, entry: Any) -> None:
    said: list[str] = []
    full = record(*BOTH, _4096x4096=times(5, 10))
    replace(full, path=open_record(tmp_path, PLACE, said.append).path).save(said.append)
    path = next((tmp_path / "trials").glob("*.json"))
    data = json.loads(path.read_text())
    data["shapes"]["8x16 bf16"] = entry
    data["outcomes"]["other"] = {"name": "other", "verdict": "fast"}
    path.write_text(json.dumps(data))
    found = open_record(tmp_path, PLACE, said.append)
    assert dict(found.shapes) == dict(full.shapes) and found.outcomes.keys() == {
        OURS,
        "vllm:auto:bf16",
    }
    assert len(said) == 2 and all("dropped the entry" in line for line in said)


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "trials").write_text("a file")
    replace(record(*BOTH), path=tmp_path / "trials" / "x.json").save(said.append)
    assert len(said) == 1 and said[0].startswith("warning: results of trials are not kept")


def test_a_trial_that_did_not_run_changes_no_verdict() -> None:
    found = record(*BOTH).with_outcomes([Outcome(OURS, "not run"), Outcome("new", "not run")])
    assert found.outcomes[OURS].verdict == "right" and found.outcomes["new"].verdict == "not run"


# --- the report ---


def test_a_report_is_read_as_it_was_written_and_has_an_exit_code(tmp_path: Path) -> None:
    report = Report(PLACE, "2026-11-25", 12.0, BOTH, wrong=("decode",), memory={"a": 1})
    assert parse_report(json.loads(json.dumps(report.to_json()))) == report
    assert report.exit_code is ExitCode.CANARY and replace(report, wrong=()).exit_code == 0
    for text in ("", "{}", '{"format": 2}', "[]"):
        (tmp_path / "report.json").write_text(text)
        with pytest.raises(NibbleError, match=r"is not a report of `nibble selftest`"):
            read_report(tmp_path / "report.json")
