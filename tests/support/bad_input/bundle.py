"""Rows about `nibble bundle`: what it refuses before it writes."""

from __future__ import annotations

from tests.support.bad_input.case import Case, Row, row


def bundle_rows() -> list[Row]:
    """The rows of this topic."""
    return [
        row(
            "bundle-engine",
            "`nibble bundle` where DOCKER names nothing that runs",
            3,
            "… is not a program; expected docker or podman; correct or unset DOCKER",
            Case(("bundle", "{model}", "{tmp}/bundle"), {"DOCKER": "{tmp}/none"}),
        ),
        row(
            "bundle-folder",
            "`nibble bundle` into a folder that exists",
            5,
            "… exists; expected a new folder; name another one, or remove it",
            Case(("bundle", "{model}", "{tmp}")),
        ),
    ]
