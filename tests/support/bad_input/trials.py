"""Rows about `nibble selftest`, `tune` and `recipes verify`: refused before a kernel runs."""

from __future__ import annotations

from tests.support.bad_input.case import Case, Row, file, row

SHAPE = "4096x4096"


def trial_rows() -> list[Row]:
    """Words, files, and machines without what they need."""
    return [
        row(
            "selftest-trial",
            "`nibble selftest` with a trial that this machine does not have",
            2,
            "this machine has no trial '…'; expected one of conversions, …; correct --only or"
            " --plant",
            Case(("selftest", "--only", "decode")),
            Case(("selftest", "--plant", "decode=hang")),
        ),
        row(
            "selftest-fault",
            "`nibble selftest` or `tune` with a fault that does not exist",
            2,
            "--plant …; expected KERNEL=FAULT with one of hang, wrong, nan, crash; correct --plant",
            Case(("selftest", "--plant", "head=slow")),
            Case(("selftest", "--plant", "head")),
            Case(("tune", "--shape", SHAPE, "--plant", "nibble=slow")),
        ),
        row(
            "selftest-out",
            "`nibble selftest --out` in a folder that does not exist",
            5,
            "…/report.json cannot be written (…); name a file in a folder that this user can write",
            Case(("selftest", "--out", "{tmp}/none/report.json")),
        ),
        row(
            "selftest-limit",
            "`nibble selftest` or `tune` without time",
            2,
            "Invalid value for '--…': …; see `nibble … --help`",
            Case(("selftest", "--limit", "0")),
            Case(("tune", "--seconds", "0")),
        ),
        row(
            "tune-shape",
            "`nibble tune --shape` with what is not a shape",
            2,
            "--shape …; expected …; correct --shape",
            Case(("tune", "--shape", "4096")),
            Case(("tune", "--shape", "4096x4096:fp9")),
            Case(("tune", "--shape", "4095x4096")),
            Case(("tune", "--shape", "0x16")),
            Case(("tune", "--shape", "128x8x2048")),
            Case(("tune", "--shape", "8x16x2048x768x2")),
            Case(("tune", "--shape", "128x8x2048x760x2")),
            Case(("tune", "--shape", "128x8x2048x768x3")),
        ),
        row(
            "tune-cpu",
            "`nibble tune` without a GPU",
            3,
            "the CPU has one linear kernel for NVFP4, so nothing is chosen by time; expected a GPU;"
            " run `nibble selftest` to check the CPU's kernels",
            Case(("tune", "--shape", SHAPE)),
            Case(("tune", "{model}")),
        ),
        row(
            "verify-report",
            "`nibble recipes verify` with a file that is not a report",
            2,
            "…/report.json is not a report of `nibble selftest` (…); make one with `nibble selftest"
            " --out FILE`",
            Case(("recipes", "verify", "a/b", "--report", "{tmp}/report.json")),
            Case(
                ("recipes", "verify", "a/b", "--report", "{tmp}/report.json"),
                prepare=file("report.json", b'{"format": 1}'),
            ),
        ),
        row(
            "verify-model",
            "`nibble recipes verify` with a folder",
            2,
            "… is not the id of a model; expected ORG/NAME; name the model as its recipe does",
            Case(("recipes", "verify", "{model}", "--report", "{tmp}/report.json")),
        ),
    ]
