"""`nibble patches status|check|apply|revert`: patches of vLLM, and the probes of its defects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nibble.cli.common import Json, print_json

Root = Annotated[
    str | None,
    typer.Option(
        "--root",
        help="Site-packages folder or vLLM's unpacked source. Default: the installed vLLM.",
    ),
]

app = typer.Typer(
    no_args_is_help=True, help="Patches of vLLM, and the probes that show their defects."
)


@app.command("status")
def patches_status(tree: Root = None, as_json: Json = False) -> None:
    """Run every probe and show each patch's state."""
    from nibble.cli.show_patches import show_patches
    from nibble.engine.patching.status import look

    there = _tree(tree)
    lines = look(there)
    print_json([vars(line) for line in lines]) if as_json else show_patches(there, lines)


@app.command("check")
def patches_check(tree: Root = None, as_json: Json = False) -> None:
    """Like status, and exit with 6 if a probe does not pass. `nibble doctor` shows the table."""
    from nibble.cli.show_patches import show_patches
    from nibble.engine.patching.status import check, keep_report, look

    there = _tree(tree)
    lines = look(there)
    print_json([vars(line) for line in lines]) if as_json else show_patches(there, lines)
    keep_report(there, lines)
    check(there, lines)


@app.command("apply")
def patches_apply(tree: Root = None) -> None:
    """Apply the series as one step; a second time it changes nothing."""
    from nibble.engine.patching.apply import apply_series
    from nibble.engine.patching.series import load_series

    there = _tree(tree)
    done = apply_series(there, load_series("vllm"))
    print(
        f"{there.root}: "
        + (f"applied {', '.join(done)}" if done else "all patches are already applied")
    )


@app.command("revert")
def patches_revert(tree: Root = None) -> None:
    """Restore every patched file, byte for byte."""
    from nibble.engine.patching.apply import revert_series
    from nibble.engine.patching.series import load_series

    there = _tree(tree)
    done = revert_series(there, load_series("vllm"))
    print(f"{there.root}: " + (f"reverted {', '.join(done)}" if done else "no patch was applied"))


def _tree(root: str | None) -> Any:
    from nibble.engine.patching.status import installed_tree
    from nibble.engine.patching.tree import open_tree

    return open_tree(Path(root)) if root else installed_tree()
