"""`nibble plan A B`: how the models of one server share its memory."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from rich.markup import escape

from nibble.cli.common import print_json
from nibble.cli.fleet import VISIBLE, fleet_json, plan_all, shares
from nibble.cli.tables import plain_table, wide_console
from nibble.errors import ExitCode, NibbleError
from nibble.plan.gather import read_wishes
from nibble.plan.memory import show_gib
from nibble.settings.models import Several, without_model


def plan_several(several: Several, environ: Mapping[str, str], explained: str | None) -> None:
    """Print a table, or everything with --json. Raises what `serve` would end with."""
    if explained is not None:
        raise NibbleError(
            ExitCode.USAGE,
            what="--explain with several models",
            expected="one model",
            action=f"run `nibble plan {several.models[0].model} --explain {explained}`",
        )
    asked = read_wishes(several.words, without_model(environ, "model"), ("--json",))
    with tempfile.TemporaryDirectory(prefix="nibble-") as folder:
        planned = plan_all(asked, several, environ, Path(folder))
    parts, allowed_bytes = shares(planned, asked)
    if "--json" in asked.command.rest:
        models = fleet_json(planned, parts)
        print_json({"allowed_bytes": allowed_bytes, "models": models})
        return
    columns = ["model", "names", "weights", "KV cache", "in all", "unloads by"]
    has_groups = any(one.environ for one in planned)
    table = plain_table(*columns, *(["GPUs"] if has_groups else []))
    for one, share in zip(planned, parts, strict=True):
        budget = one.plan.budget
        table.add_row(
            escape(one.wish.model),
            escape(", ".join(one.names)),
            show_gib(budget.weights_bytes),
            show_gib(share.kv_bytes),
            show_gib(share.total_bytes),
            share.unloading.partition(":")[0],
            *([one.environ.get(VISIBLE, "")] if has_groups else []),
        )
    wide_console().print(table)
    for group in sorted({one.group for one in planned}):
        own = [share for one, share in zip(planned, parts, strict=True) if one.group == group]
        total = sum(share.total_bytes for share in own)
        fits = "all fit together" if total <= allowed_bytes else "they are loaded by turns"
        where = f"group {group} of GPUs: " if has_groups else ""
        print(f"{where}{show_gib(total)} in all, {show_gib(allowed_bytes)} may be used: {fits}")
    for line in dict.fromkeys(share.unloading for share in parts if ": " in share.unloading):
        print(line)
    print("`nibble plan MODEL` shows the settings of one")
