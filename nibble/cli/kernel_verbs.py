"""`nibble selftest` and `nibble tune` as people type them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from nibble.cli.common import Json, Words, print_json, wanted


def selftest(
    out: Annotated[
        Path | None,
        typer.Option(help="File for the report as JSON, without secrets."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Trial to run, such as decode; repeatable.")
    ] = None,
    plant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRIAL=FAULT",
            help=(
                "Fault to plant in a kernel, to see it found: hang, wrong, nan or crash;"
                " repeatable."
            ),
        ),
    ] = None,
    limit: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds for all trials together.")
    ] = 180.0,
    as_json: Json = False,
) -> None:
    """Compare each kernel of this machine with float64. It measures the memory's bandwidth too, and
    exits with 8 where a kernel that a plan would use is wrong.
    """
    from nibble.cli.selftest import check_writable, show_report, write_report
    from nibble.cli.selftest import selftest as run

    if out is not None:
        check_writable(out)
    report = run(dict(os.environ), tuple(plant or ()), tuple(only or ()), limit)
    print_json(report.to_json()) if as_json else show_report(report)
    if out is not None:
        write_report(report, out)
    raise typer.Exit(report.exit_code)


def tune(
    words: Words = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROWSxCOLUMNS",
            help=(
                "Shape in place of a model's, as 4096x14336, of an FP8 layer as 4096x14336:fp8;"
                " experts as 128x8x2048x768x2; repeatable."
            ),
        ),
    ] = None,
    plant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRIAL=FAULT", help="Fault to plant, as for selftest; nothing is kept then."
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, max=600, help="Seconds for each kernel after its start.")
    ] = 15.0,
    as_json: Json = False,
) -> None:
    """Time nibble's and vLLM's kernels on a model's shapes. Later plans use the result."""
    from nibble.cli.tune import show_tuned, tune_model

    found = tune_model(wanted(words, "tune"), dict(os.environ), shape or (), plant or (), seconds)
    print_json(found) if as_json else show_tuned(found)
