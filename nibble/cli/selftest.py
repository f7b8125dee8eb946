"""`nibble selftest`: each kernel of this machine against float64, its memory and its links."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.markup import escape

from nibble.cli.common import say
from nibble.cli.tables import plain_table, wide_console
from nibble.engine.installed import torch_cuda, vllm_version
from nibble.errors import ExitCode, NibbleError
from nibble.machine.disk import write_problem
from nibble.machine.gpu_state import describe, gpu_states
from nibble.machine.gpu_users import gpu_uses
from nibble.machine.hardware import Hardware, detect
from nibble.machine.targets import Target, load_target
from nibble.plan.budget import host_reserve_bytes
from nibble.plan.gather import Asked, choose_target, read_wishes
from nibble.plan.memory import limits, show_gib
from nibble.serve.preflight.machine import check_hardware
from nibble.trials.catalog import selftest_trials, wrong_in_a_plan
from nibble.trials.findings import (
    Finding,
    driver_too_old,
    known_bad_driver,
    not_idle,
    slowed_down,
    unknown_gpus,
)
from nibble.trials.place import place_of
from nibble.trials.record import open_record
from nibble.trials.report import Report, gb_per_s
from nibble.trials.run import run_trials
from nibble.trials.trial import PLANTS, Fault, Outcome, Trial, planted

MOST_AT_ONCE = 6
CORES_EACH = 2  # importing vLLM and compiling take a core or two
ALL_S = 180.0


def selftest(
    environ: Mapping[str, str],
    plants: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    limit_s: float = ALL_S,
) -> Report:
    """Run every trial of this machine and store the outcomes for plans. Raises NibbleError for a
    setting that cannot be read, and NO_HARDWARE where the target has GPUs and the machine none.
    """
    began = time.monotonic()
    asked = read_wishes([], environ)
    hardware = detect(asked.accepted.environ)
    target, findings = _target(asked, hardware)
    if not hardware.gpus and target.device == "cuda":
        check_hardware(target, hardware)
    findings += [*known_bad_driver(target, hardware.driver)] if target.device == "cuda" else []
    findings += _states_of(hardware, target)
    trials = _chosen(target, hardware, only, faults_of(plants))
    if driver_too_old(hardware, torch_cuda()):
        trials = ()  # no kernel would start
    place = place_of(target, hardware)
    outcomes = run_trials(
        trials,
        asked.accepted.environ,
        at_once=at_once(hardware, target),
        until=began + limit_s,
        on_done=lambda outcome: say(_progress(outcome)),
    )
    wrong = wrong_in_a_plan(target, outcomes)
    if not plants and not only:
        record = open_record(asked.cache, place, say)
        record.with_outcomes(outcomes).save(say)
    indices = [gpu.index for gpu in hardware.gpus] if target.device == "cuda" else []
    return Report(
        place,
        datetime.now(UTC).isoformat(timespec="seconds"),
        round(time.monotonic() - began, 1),
        tuple(outcomes),
        tuple(findings),
        tuple(outcome.name for outcome in wrong),
        tuple(describe(state) for state in gpu_states(indices)) if indices else (),
        _memory(target, hardware, asked),
    )


def _target(asked: Asked, hardware: Hardware) -> tuple[Target, list[Finding]]:
    """The target to test; beside an unknown GPU the CPU, on which nibble serves there."""
    if unknown := unknown_gpus(hardware):
        return load_target("cpu"), unknown
    old = driver_too_old(hardware, torch_cuda())
    return choose_target(asked.settings, asked, hardware)[0], old


def _states_of(hardware: Hardware, target: Target) -> list[Finding]:
    if target.device != "cuda":
        return []
    indices = [gpu.index for gpu in hardware.gpus]
    return not_idle(gpu_uses(indices)) + slowed_down(gpu_states(indices))


def faults_of(plants: Sequence[str]) -> dict[str, Fault]:
    """`KERNEL=FAULT` words. Raises USAGE."""
    found: dict[str, Fault] = {}
    for word in plants:
        kernel, _, fault = word.rpartition("=")
        if not kernel or fault not in PLANTS:
            raise NibbleError(
                ExitCode.USAGE,
                what=f"--plant {word}",
                expected=f"KERNEL=FAULT with one of {', '.join(PLANTS)}",
                action="correct --plant",
            )
        found[kernel] = next(known for known in PLANTS if known == fault)
    return found


def _chosen(
    target: Target, hardware: Hardware, only: tuple[str, ...], faults: Mapping[str, Fault]
) -> tuple[Trial, ...]:
    trials = selftest_trials(target, len(hardware.gpus), bool(vllm_version()))
    names = [trial.name for trial in trials]
    if unknown := [name for name in (*only, *faults) if name not in names]:
        raise NibbleError(
            ExitCode.USAGE,
            what=f"this machine has no trial {unknown[0]!r}",
            expected=f"one of {', '.join(names)}",
            action="correct --only or --plant",
        )
    return planted([trial for trial in trials if not only or trial.name in only], faults)


def at_once(hardware: Hardware, target: Target) -> int:
    """Processes at a time. On the CPU each takes all cores."""
    if target.device == "cpu":
        return 1
    return max(1, min(MOST_AT_ONCE, hardware.cpu_cores // CORES_EACH))


def _memory(target: Target, hardware: Hardware, asked: Asked) -> dict[str, int | str | None]:
    """What the watchdog leaves to a server, in bytes."""
    given = asked.settings.memory_reserve_gib
    reserve = host_reserve_bytes(
        target,
        hardware.memory_total_bytes,
        None if given is None else int(given * (1 << 30)),
    )
    watch = limits(reserve)
    free = [gpu.memory_free_bytes for gpu in hardware.gpus] if target.device == "cuda" else []
    return {
        "host_total_bytes": hardware.memory_total_bytes,
        "host_available_bytes": hardware.memory_available_bytes,
        "limited_by": hardware.memory_limited_by,
        "reserve_bytes": reserve,
        "pause_below_bytes": watch.pause_below_bytes,
        "stop_below_bytes": watch.stop_below_bytes,
        "gpu_free_bytes": min((each for each in free if each is not None), default=None),
        "gpu_reserve_bytes": target.memory.reserve_bytes if target.device == "cuda" else None,
    }


def check_writable(out: Path) -> None:
    """Raise CONFIG for a report's file that cannot be written, before a minute of trials."""
    if not out.parent.is_dir():
        raise _not_writable(out, "there is no such folder")
    if problem := write_problem(out.parent):
        raise _not_writable(out, problem)


def write_report(report: Report, out: Path) -> None:
    """Write the JSON atomically. Raises CONFIG."""
    scratch = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps(report.to_json(), indent=1) + "\n")
        scratch.replace(out)
    except OSError as error:
        raise _not_writable(out, error.strerror or str(error)) from None


def _not_writable(out: Path, why: str) -> NibbleError:
    return NibbleError(
        ExitCode.CONFIG,
        what=f"{out} cannot be written ({why})",
        action="name a file in a folder that this user can write",
    )


def _progress(outcome: Outcome) -> str:
    return f"{outcome.line()}, {outcome.seconds:.1f} s"


def show_report(report: Report) -> None:
    """Print the tables and, last, the verdict."""
    console = wide_console()
    place = report.place
    driver = f", driver {place.driver}, CUDA {place.cuda}" if place.driver else ""
    console.print(
        f"{escape(place.device)} ({place.target}){driver}, build {place.build}", style="bold"
    )
    table = plain_table("kernel", "result", "computed by", "error", "GB/s with one row", "why")
    colours = {"right": "green", "refused": "dim", "not run": "yellow"}
    for outcome in report.outcomes:
        colour = colours.get(outcome.verdict, "red")
        rates = ", ".join(f"{shape} {rate:.0f}" for shape, rate in gb_per_s(outcome))
        error = "" if outcome.error is None else f"{outcome.error:.2g}"
        cells = (outcome.ran, error, rates, outcome.detail or _facts(outcome))
        table.add_row(escape(outcome.name), f"[{colour}]{outcome.verdict}[/]", *map(escape, cells))
    console.print(table)
    for state in report.states:
        console.print(escape(state))
    console.print(escape(memory_line(report)), soft_wrap=True)
    for finding in report.findings:
        console.print(f"[yellow]note:[/] {escape(finding.line())}", soft_wrap=True)
    console.print(verdict_line(report), soft_wrap=True, markup=False)


def _facts(outcome: Outcome) -> str:
    kept = {name: value for name, value in outcome.facts.items() if name != "pairs"}
    return ", ".join(f"{name} {value}" for name, value in kept.items())


def memory_line(report: Report) -> str:
    memory = report.memory
    available, reserve = int(memory["host_available_bytes"]), int(memory["reserve_bytes"])
    text = (
        f"host memory: {show_gib(available)} available ({memory['limited_by']}), the watchdog keeps"
        f" {show_gib(reserve)}: {show_gib(max(0, available - reserve))} for a server"
    )
    if (free := memory.get("gpu_free_bytes")) is not None:
        kept = int(memory["gpu_reserve_bytes"] or 0)
        text += f"; each GPU: {show_gib(free)} free, {show_gib(max(0, free - kept))} for a server"
    return text


def verdict_line(report: Report) -> str:
    """The last line."""
    counts = [outcome.verdict for outcome in report.outcomes]
    done = f"{counts.count('right')} right, {counts.count('refused')} not for this machine"
    bad = [outcome.name for outcome in report.outcomes if outcome.is_fault]
    late = counts.count("not run")
    text = done + (f", {late} not run" if late else "") + f", in {report.seconds:.0f} s"
    if report.wrong:
        return f"{text}; a plan would use these faulty kernels: {', '.join(report.wrong)} (exit 8)"
    if bad:
        return f"{text}; at fault, and no plan uses them: {', '.join(bad)}"
    return text
