"""What `nibble doctor` says of the self-test of this machine's kernels."""

from __future__ import annotations

from nibble.cli.doctor.report import Check
from nibble.machine.hardware import Hardware
from nibble.machine.targets import Target
from nibble.plan.gather import Asked
from nibble.trials.place import place_of
from nibble.trials.record import Record, open_record

NAME, COMMAND = "self-test", "nibble selftest"


def selftest_check(asked: Asked | None, target: Target | None, here: Hardware) -> list[Check]:
    """The results for this device, driver and build, or the offer to get some."""
    if asked is None or target is None:
        return []
    dropped: list[str] = []
    return [check_record(open_record(asked.cache, place_of(target, here), dropped.append))]


def check_record(record: Record) -> Check:
    """Faults fail; a machine without results gets an offer. Pure."""
    outcomes = record.outcomes.values()
    if bad := [outcome.line() for outcome in outcomes if outcome.is_fault]:
        fix = f"run `{COMMAND}` again, and send its report if the fault stays"
        return Check(NAME, "warning", f"kernels at fault: {'; '.join(bad)}", fix)
    right = sum(outcome.verdict == "right" for outcome in outcomes)
    if not right:
        what = f"not run for this device, driver and build; `{COMMAND}` takes one to two minutes"
        return Check(NAME, "ok", what)
    return Check(NAME, "ok", f"{right} kernels and measurements are right on this device")
