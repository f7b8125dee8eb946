"""`nibble recipes …`, `patches …`, `cache …` and `cluster …`, and what all verbs share."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nibble.errors import ExitCode

# nibble.settings.command_line reads the words after these verbs: it knows nibble's options and
# vLLM's flags.
FREE_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
Words = Annotated[list[str] | None, typer.Argument(metavar="[MODEL] [FLAGS]")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Root = Annotated[
    str | None,
    typer.Option(
        "--root",
        help="Site-packages folder or vLLM's unpacked source. Default: the installed vLLM.",
    ),
]

recipes_app = typer.Typer(
    no_args_is_help=True, help="Recipes: what is known about serving a model on a target."
)
patches_app = typer.Typer(
    no_args_is_help=True, help="Patches of vLLM, and the probes that show their defects."
)
cache_app = typer.Typer(no_args_is_help=True, help="Compiled code that the next start reuses.")
cluster_app = typer.Typer(no_args_is_help=True, help="Several machines that serve one model.")
GROUPS = {
    "recipes": recipes_app,
    "patches": patches_app,
    "cache": cache_app,
    "cluster": cluster_app,
}


def print_json(data: Any) -> None:
    """Plain data on stdout."""
    print(json.dumps(data, indent=2, default=str))


def wanted(words: Sequence[str] | None, verb: str) -> list[str]:
    """The words of a verb; prints our own help where it is asked for, since typer's does not
    know vLLM's flags.
    """
    given = list(words or ())
    if "--help" in given or "-h" in given:
        from nibble.cli.show import show_verb_help

        show_verb_help(verb)
        raise typer.Exit(ExitCode.OK)
    return given


@recipes_app.command("list")
def recipes_list(as_json: Json = False) -> None:
    """All recipes, with the status for each target."""
    from nibble.cli.show import recipe_rows, show_recipes

    rows = recipe_rows()
    print_json(rows) if as_json else show_recipes(rows)


@recipes_app.command("show")
def recipes_show(model: str, as_json: Json = False) -> None:
    """One recipe: what it sets for each target, and on what evidence."""
    from nibble.cli.show import recipe_data, show_recipe

    data = recipe_data(model)
    print_json(data) if as_json else show_recipe(data)


@recipes_app.command("lint")
def recipes_lint(
    paths: Annotated[list[str] | None, typer.Argument()] = None, as_json: Json = False
) -> None:
    """Check every flag, choice, nested key and variable against the installed vLLM."""
    from nibble.machine.paths import root
    from nibble.recipes.lint import lint

    problems = lint(root(), paths or ())
    if as_json:
        print_json([vars(problem) for problem in problems])
    else:
        for problem in problems:
            print(problem.line())
        print(f"{len(problems)} problem(s)", file=sys.stderr)
    raise typer.Exit(ExitCode.VERIFY if problems else ExitCode.OK)


@patches_app.command("status")
def patches_status(tree: Root = None, as_json: Json = False) -> None:
    """Run every probe and print both tables: applied, needed, fixed upstream, not applicable."""
    from nibble.cli.show import show_patches
    from nibble.engine.patching.status import look

    there = _tree(tree)
    lines = look(there)
    print_json([vars(line) for line in lines]) if as_json else show_patches(there, lines)


@patches_app.command("check")
def patches_check(tree: Root = None, as_json: Json = False) -> None:
    """Like status, and exit 6 naming the first probe that does not pass; leaves the table for
    `nibble doctor`.
    """
    from nibble.cli.show import show_patches
    from nibble.engine.patching.status import check, keep_report, look

    there = _tree(tree)
    lines = look(there)
    print_json([vars(line) for line in lines]) if as_json else show_patches(there, lines)
    keep_report(there, lines)
    check(there, lines)


@patches_app.command("apply")
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


@patches_app.command("revert")
def patches_revert(tree: Root = None) -> None:
    """Restore every patched file, byte for byte."""
    from nibble.engine.patching.apply import revert_series
    from nibble.engine.patching.series import load_series

    there = _tree(tree)
    done = revert_series(there, load_series("vllm"))
    print(f"{there.root}: " + (f"reverted {', '.join(done)}" if done else "no patch was applied"))


@cache_app.command("ls")
def cache_ls(as_json: Json = False) -> None:
    """Every entry: its size, what it is for, when it was used last."""
    from nibble.cli.cache import found, show
    from nibble.engine.installed import compiled_id

    there = found(dict(os.environ))
    print_json([entry.to_json() for entry in there]) if as_json else show(there, compiled_id())


@cache_app.command("verify")
def cache_verify(as_json: Json = False) -> None:
    """Compare every entry with its record, and drop those that differ: the next start compiles
    them again.
    """
    from nibble.cli.cache import verify

    results = verify(dict(os.environ))
    if as_json:
        print_json([vars(result) for result in results])
    else:
        for result in results:
            print(result.line())


@cache_app.command("prune")
def cache_prune(
    older_than: Annotated[
        float | None,
        typer.Option("--older-than", metavar="DAYS", help="Remove entries unused for longer."),
    ] = None,
    max_gib: Annotated[
        float | None,
        typer.Option("--max-gib", help="Remove the least recently used until the rest fits."),
    ] = None,
    all_but_current: Annotated[
        bool,
        typer.Option(
            "--all-but-current", help="Remove entries of builds other than the installed one."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what it would remove.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove entries no server uses, by age, size or build."""
    from nibble.cli.cache import prune

    gone = prune(dict(os.environ), older_than, max_gib, all_but_current, dry_run)
    if as_json:
        print_json([entry.to_json() for entry in gone])
    else:
        freed = sum(entry.size_bytes for entry in gone)
        for entry in gone:
            print(f"{'would remove' if dry_run else 'removed'} {entry.folder}")
        print(f"{len(gone)} entries, {freed} bytes")


@cluster_app.command("status", context_settings=FREE_WORDS)
def cluster_status(words: Words = None) -> None:
    """The nodes that the head knows, who holds what, and who is lost."""
    from nibble.cli.cluster import cluster_nodes, node_rows
    from nibble.plan.gather import read_wishes

    asked = read_wishes(wanted(words, "cluster status"), dict(os.environ), ("--json",))
    found = cluster_nodes(asked)
    if "--json" in asked.command.rest:
        print_json(found)
        return
    for row in node_rows(found):
        print("  ".join(row))
    if any(node["role"] == "serve" for node in found["nodes"]):  # a Ray head knows of no runs
        print(f"run {found['run']} is {found['state']}")


@cluster_app.command("check", context_settings=FREE_WORDS)
def cluster_check(words: Words = None) -> None:
    """The checks before a start, alone: are all nodes there (--nnodes), do they fit together, reach
    one another, and add up the same numbers? With MODEL: have they got it, or can they download it,
    and have they the memory for it?
    """
    from nibble.cli.cluster import cluster_check as check
    from nibble.cli.cluster import network_lines
    from nibble.plan.gather import read_wishes

    asked = read_wishes(wanted(words, "cluster check"), dict(os.environ), ("--json",))
    report = check(asked, _say)
    if "--json" in asked.command.rest:
        print_json(report.to_json())
    else:
        for problem in report.problems:
            print(f"node {problem.node}: {problem.what}; {problem.action}")
        for line in network_lines(report):
            print(line)
        if report.reduce:
            found = report.reduce
            print(
                f"all-reduce over {found['nodes']} nodes: {found['gb_per_s']} GB/s"
                f" ({found['backend']})"
            )
    raise typer.Exit(ExitCode.CLUSTER if report.problems else ExitCode.OK)


@cluster_app.command("manifest", context_settings=FREE_WORDS)
def cluster_manifest(
    kind: Annotated[str, typer.Argument(help="Kind of manifest: kuberay or lws.")],
    words: Words = None,
    image: Annotated[str, typer.Option(help="Image of every pod.")] = "nibble:b200",
) -> None:
    """Print a Kubernetes manifest (JSON, for `kubectl apply -f -`) that serves the plan of MODEL
    and FLAGS.
    """
    from nibble.cli.manifests import carried, manifest, read_kind, words_for
    from nibble.plan.gather import plan_for, read_wishes

    asked = read_wishes(wanted(words, "cluster manifest"), dict(os.environ))
    environ = carried(asked, dict(os.environ))
    print_json(manifest(read_kind(kind), plan_for(asked), words_for(asked.command), image, environ))


def _say(text: str) -> None:
    """A line of nibble's own, on stderr."""
    print(f"[nibble] {text}", file=sys.stderr, flush=True)


def _tree(root: str | None) -> Any:
    from nibble.engine.patching.status import installed_tree
    from nibble.engine.patching.tree import open_tree

    return open_tree(Path(root)) if root else installed_tree()
