"""The `nibble` command: declares the verbs and calls the modules that do the work."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nibble import __version__
from nibble.cli import (
    cache,
    checkpoint_verbs,
    cluster,
    evaluate,
    kernel_verbs,
    measuring_verbs,
    patches,
    recipes,
    release_verbs,
    trace,
)
from nibble.cli.common import FREE_WORDS, Json, Words, print_json, say, wanted
from nibble.cli.failures import guarded
from nibble.errors import ExitCode
from nibble.machine.early_stop import stop_early

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich would take half of its time
    help="Serve NVFP4 models on vLLM.",
)
GROUPS = {
    "recipes": recipes.app,
    "patches": patches.app,
    "cache": cache.app,
    "cluster": cluster.app,
}
for name, group in GROUPS.items():
    app.add_typer(group, name=name)


@app.command(context_settings=FREE_WORDS)
def serve(words: Words = None) -> None:
    """Serve a model, or several, with an OpenAI-compatible API."""
    from nibble.cli.serve import serve as run

    raise typer.Exit(run(wanted(words, "serve"), dict(os.environ)))


Port = Annotated[
    int | None, typer.Option("--port", help="Port of the server's API; default: PORT, else 8000.")
]


@app.command()
def stop(port: Port = None) -> None:
    """Drain and end a server that `serve --detach` started. Exits with the server's code, or with 0
    without a server.
    """
    from nibble.cli.serve import background_place
    from nibble.serve.background import stop as run

    code, said = run(background_place(port, dict(os.environ)))
    say(said)
    raise typer.Exit(code)


@app.command()
def logs(
    port: Port = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the log until the server ends.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Number of last lines to print.")
    ] = 100,
) -> None:
    """Show the log of a server that `serve --detach` started. It stays after the server's end."""
    from nibble.cli.serve import background_place
    from nibble.serve.background import show_logs

    show_logs(background_place(port, dict(os.environ)), lines, follow)


@app.command(context_settings=FREE_WORDS)
def plan(words: Words = None) -> None:
    """Show every setting of a start with source and reason. `--explain FLAG` shows every source of
    one flag or variable.
    """
    from nibble.cli.explain import explain, split_words
    from nibble.plan.gather import plan_for, read_wishes, with_default_model
    from nibble.settings.models import read_several

    kept, name = split_words(wanted(words, "plan"))
    if several := read_several(kept, os.environ, ("--json",)):
        from nibble.cli.show_fleet_plan import plan_several

        return plan_several(several, dict(os.environ), name)
    asked = with_default_model(read_wishes(kept, dict(os.environ), ("--json",)))
    found = plan_for(asked)
    if name is not None:
        explain(found, name, "--json" in asked.command.rest)
    elif "--json" in asked.command.rest:
        print_json(found.to_json())
    else:
        from nibble.cli.show_plan import show_plan

        show_plan(found)


app.command(context_settings=FREE_WORDS)(checkpoint_verbs.inspect)
app.command()(checkpoint_verbs.convert)
app.command()(checkpoint_verbs.reference)
app.command(context_settings=FREE_WORDS)(checkpoint_verbs.pull)


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(help="Model whose start to check too.")] = None,
    as_json: Json = False,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle", metavar="PATH", help="File of a .tar.gz for a bug report, without secrets."
        ),
    ] = None,
) -> None:
    """Check this machine for what stops or slows a server."""
    from nibble.cli.doctor.bundle import open_bundle, write_bundle
    from nibble.cli.doctor.checks import diagnose
    from nibble.cli.doctor.show import show_report

    environ = dict(os.environ)
    file = open_bundle(bundle) if bundle else None
    report = diagnose(environ, model or environ.get("MODEL"))
    print_json(report.to_json()) if as_json else show_report(report)
    if file is not None:
        count = write_bundle(file, report, environ, model or environ.get("MODEL"))
        print(f"{bundle}: {count} files; read it before you send it", file=sys.stderr)
    raise typer.Exit(report.exit_code)


app.command()(kernel_verbs.selftest)
app.command(context_settings=FREE_WORDS)(kernel_verbs.tune)


@app.command()
def status(as_json: Json = False) -> None:
    """Show what the running server does, its kernels and canary."""
    from nibble.cli.status import read_status, status_lines

    found = read_status(dict(os.environ))
    if as_json:
        print_json(found)
    else:
        print("\n".join(status_lines(found)))


@app.command()
def chat(
    question: Annotated[str, typer.Argument(help="What to ask, in quotes.")],
    model: Annotated[str, typer.Option(help="Served model.")] = "default",
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.")] = 256,
) -> None:
    """Ask the running server a question. HOST, PORT and NIBBLE_API_KEY say which."""
    from nibble.cli.chat import ask

    ask(question, model, max_tokens, dict(os.environ))


app.command()(measuring_verbs.bench)
app.command()(measuring_verbs.soak)
app.command(evaluate.VERB)(evaluate.evaluate)
app.command(trace.VERB)(trace.trace)
app.command()(release_verbs.bundle)
app.command()(release_verbs.upgrade)
app.command()(release_verbs.rollback)


@app.command()
def version(as_json: Json = False) -> None:
    """Show versions of nibble and of the software that it runs."""
    from nibble.cli.version import versions

    found = versions()
    if as_json:
        print_json(found)
    else:
        for name, value in found.items():
            print(f"{name} {value or 'not installed'}")


@app.command("ray-head", context_settings=FREE_WORDS)
def ray_head(words: Words = None) -> None:
    """Start the head node of a Ray cluster in the foreground."""
    from nibble.cluster.ray_node import ray_head as run

    asked = _node_wishes(words, "ray-head")
    raise typer.Exit(run(asked.settings, asked.accepted.environ))


@app.command("ray-worker", context_settings=FREE_WORDS)
def ray_worker(words: Words = None) -> None:
    """Join a Ray cluster as a worker, in the foreground."""
    from nibble.cluster.ray_node import ray_worker as run

    asked = _node_wishes(words, "ray-worker")
    raise typer.Exit(run(asked.settings, asked.accepted.environ))


def _node_wishes(words: list[str] | None, verb: str) -> Any:
    from nibble.plan.gather import read_wishes
    from nibble.settings.node_words import check_node_words

    asked = read_wishes(wanted(words, verb), dict(os.environ))
    check_node_words(asked.command, verb)
    return asked


@app.command(hidden=True)
def docs(check: bool = False) -> None:
    """Write the generated parts of the documentation; --check only compares."""
    from nibble.cli.docs import update

    stale = update(check)
    for path in stale:
        print(f"{'stale' if check else 'written'}: {path}")
    raise typer.Exit(ExitCode.VERIFY if check and stale else ExitCode.OK)


def verbs() -> list[str]:
    """Every first word that `nibble` takes, in the order of its help."""
    commands = [one for one in app.registered_commands if not one.hidden]
    return [one.name or getattr(one.callback, "__name__", "") for one in commands] + list(GROUPS)


def main() -> None:
    """Run, and turn every failure into one line and its exit code."""
    stop_early(sys.argv[1:])  # again: an older console script begins here
    sys.exit(guarded(lambda: app(standalone_mode=False)))


def _version_option(value: bool) -> None:
    if value:
        print(f"nibble {__version__}")
        raise typer.Exit(ExitCode.OK)


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version_option, is_eager=True, help="Show nibble's version."
        ),
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    main()
