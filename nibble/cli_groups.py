"""`nibble patches …` and `nibble cache …`: verbs only, as in cli.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Root = Annotated[
    str | None,
    typer.Option(
        "--root", help="A site-packages folder or vLLM's unpacked source; default: the installed vLLM."
    ),
]

patches_app = typer.Typer(
    no_args_is_help=True, help="What nibble changes in vLLM, and the probes that show why."
)
cache_app = typer.Typer(no_args_is_help=True, help="Compiled code kept for the next start.")


def print_json(data: Any) -> None:
    """Plain data on stdout."""
    print(json.dumps(data, indent=2, default=str))


@patches_app.command("status")
def patches_status(tree: Root = None, as_json: Json = False) -> None:
    """Run every probe and print both tables: applied, needed, fixed upstream, not applicable."""
    from nibble.patching.status import look
    from nibble.show import show_patches

    there = _tree(tree)
    lines = look(there)
    print_json([vars(line) for line in lines]) if as_json else show_patches(there, lines)


@patches_app.command("check")
def patches_check(tree: Root = None, as_json: Json = False) -> None:
    """Like status, and exit 6 naming the first probe that does not pass; leaves the table for `nibble doctor`."""
    from nibble.patching.status import check, keep_report, look
    from nibble.show import show_patches

    there = _tree(tree)
    lines = look(there)
    print_json([vars(line) for line in lines]) if as_json else show_patches(there, lines)
    keep_report(there, lines)
    check(there, lines)


@patches_app.command("apply")
def patches_apply(tree: Root = None) -> None:
    """Apply the series as one step; a second time it changes nothing."""
    from nibble.patching.apply import apply_series
    from nibble.patching.series import load_series

    there = _tree(tree)
    done = apply_series(there, load_series("vllm"))
    print(f"{there.root}: " + (f"applied {', '.join(done)}" if done else "all patches are already applied"))


@patches_app.command("revert")
def patches_revert(tree: Root = None) -> None:
    """Put every patched file back, byte for byte."""
    from nibble.patching.apply import revert_series
    from nibble.patching.series import load_series

    there = _tree(tree)
    done = revert_series(there, load_series("vllm"))
    print(f"{there.root}: " + (f"took back {', '.join(done)}" if done else "no patch was applied"))


@cache_app.command("ls")
def cache_ls(as_json: Json = False) -> None:
    """Every entry: its size, what it is for, when it was used last."""
    from nibble.build_id import build_id
    from nibble.cache_commands import found, show

    there = found(dict(os.environ))
    print_json([entry.to_json() for entry in there]) if as_json else show(there, build_id())


@cache_app.command("verify")
def cache_verify(as_json: Json = False) -> None:
    """Compare every entry with its record, and drop those that differ: the next start compiles them again."""
    from nibble.cache_commands import verify

    results = verify(dict(os.environ))
    if as_json:
        print_json([vars(result) for result in results])
    else:
        for result in results:
            print(result.line())


@cache_app.command("prune")
def cache_prune(
    older_than: Annotated[
        float | None, typer.Option("--older-than", metavar="DAYS", help="Entries unused for longer.")
    ] = None,
    max_gib: Annotated[
        float | None, typer.Option("--max-gib", help="The longest unused, until all are no larger.")
    ] = None,
    all_but_current: Annotated[
        bool, typer.Option("--all-but-current", help="Entries of other builds than the one installed here.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Remove entries no server uses, by age, size or build."""
    from nibble.cache_commands import prune

    gone = prune(dict(os.environ), older_than, max_gib, all_but_current, dry_run)
    if as_json:
        print_json([entry.to_json() for entry in gone])
    else:
        freed = sum(entry.size_bytes for entry in gone)
        for entry in gone:
            print(f"{'would remove' if dry_run else 'removed'} {entry.folder}")
        print(f"{len(gone)} entries, {freed} bytes")


def _tree(root: str | None) -> Any:
    from nibble.patching.status import installed_tree
    from nibble.patching.tree import open_tree

    return open_tree(Path(root)) if root else installed_tree()
