"""`nibble bundle`, `upgrade` and `rollback` as people type them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from nibble.cli.common import Json, print_json
from nibble.errors import ExitCode


def bundle(
    model: Annotated[str, typer.Argument(help="A folder, ORG/NAME, or a model of the image.")],
    folder: Annotated[Path, typer.Argument(help="New folder for the bundle.")],
    image: Annotated[str, typer.Option(help="Image of the local engine.")] = "nibble:cpu",
    as_json: Json = False,
) -> None:
    """Write an image and a model for use without a network. The folder also has their licences,
    checksums and two scripts: install.sh and serve.sh.
    """
    from nibble.cli.bundle import bundle as run

    run(model, folder, image, dict(os.environ), as_json)


def upgrade(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Models in use. Default: those of the running server, else MODEL."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Needed: nibble only compares.")] = False,
    to: Annotated[
        str | None, typer.Option(help="Release of vLLM. Default: the newest on the package index.")
    ] = None,
    tree: Annotated[
        Path | None, typer.Option(help="Folder of an unpacked vLLM wheel, instead of a download.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a newer vLLM would change, with --check. It compares patches, recipes and the plans
    of models in use, and exits with 6 where something is in the way.
    """
    from nibble.cli.upgrade import check as run
    from nibble.cli.upgrade import report_lines, require_check

    require_check(check)
    found = run(models or (), to, tree, dict(os.environ))
    if as_json:
        print_json(found.to_json())
    else:
        print("\n".join(report_lines(found)))
    raise typer.Exit(ExitCode.VERIFY if found.in_the_way else ExitCode.OK)


def rollback(
    target: Annotated[str, typer.Argument(help="Target of the image, such as gb10 or cpu.")],
    to: Annotated[
        str | None, typer.Option(help="Build to go back to: its tag. Default: the one before.")
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="Only list the builds on this host, newest first.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Give an image's name back to the build before. Run it on the host of the containers; their
    next restart runs that build.
    """
    from nibble.cli.rollback import roll_back

    roll_back(target, to, list_only, as_json, dict(os.environ))
