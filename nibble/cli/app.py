"""The `nibble` command: declares the verbs and calls the modules that do the work."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nibble import __version__
from nibble.cli import cache, cluster, patches, recipes
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
    """Serve a model with an OpenAI-compatible API; --detach: in the background."""
    from nibble.cli.serve import serve as run

    raise typer.Exit(run(wanted(words, "serve"), dict(os.environ)))


Port = Annotated[
    int | None, typer.Option("--port", help="Port of the server's API; default: PORT, else 8000.")
]


@app.command()
def stop(port: Port = None) -> None:
    """End a server that `serve --detach` started, as SIGTERM does; exits with the server's code, or
    0 without a server.
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
    """Show the log of a server that `serve --detach` started, also after its end."""
    from nibble.cli.serve import background_place
    from nibble.serve.background import show_logs

    show_logs(background_place(port, dict(os.environ)), lines, follow)


@app.command(context_settings=FREE_WORDS)
def plan(words: Words = None) -> None:
    """Show every setting that `serve` would use, its source and its reason. `--explain FLAG` shows
    every source of one flag or variable.
    """
    from nibble.cli.explain import explain, split_words
    from nibble.plan.gather import plan_for, read_wishes, with_default_model

    kept, name = split_words(wanted(words, "plan"))
    asked = with_default_model(read_wishes(kept, dict(os.environ), ("--json",)))
    found = plan_for(asked)
    if name is not None:
        explain(found, name, "--json" in asked.command.rest)
    elif "--json" in asked.command.rest:
        print_json(found.to_json())
    else:
        from nibble.cli.show_plan import show_plan

        show_plan(found)


@app.command(context_settings=FREE_WORDS)
def inspect(words: Words = None) -> None:
    """Show what a checkpoint holds, whether nibble loads it exactly, and what vLLM alone gets wrong
    with it.
    """
    from nibble.cli.inspection import inspect_model
    from nibble.plan.gather import read_wishes

    asked = read_wishes(wanted(words, "inspect"), dict(os.environ), ("--json", "--deep"))
    found = inspect_model(asked, "--deep" in asked.command.rest)
    if "--json" in asked.command.rest:
        print_json(found.to_json())
    else:
        from nibble.cli.show_inspection import show_inspection

        show_inspection(found)
    raise typer.Exit(found.exit_code)


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(help="A folder, the id of a pulled model, a demo, or a GGUF file (nvfp4)."),
    ],
    dest: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help=(
                "Layout: modelopt, compressed-tensors or quartet-packed, with the same NVFP4"
                " numbers;"
                " or nvfp4, which quantizes a BF16 model or a GGUF file in ModelOpt's layout"
                " (CloverLM in Quartet's)."
            ),
        ),
    ],
    activations: Annotated[
        str | None,
        typer.Option(
            help=(
                "Activations of linear layers: bf16 or fp4. Default: bf16 for --to nvfp4, else"
                " the source's."
            )
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Text file whose lines the model reads to measure: needed by --activations fp4."
                " Default of --method gptq, --kv-cache and --keep-sensitive: Python's manual."
            )
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help=(
                "Quantization of --to nvfp4: round, or gptq, which is closer to the BF16 model and"
                " needs llm-compressor (docs/nvfp4.md)."
            )
        ),
    ] = "round",
    four_over_six: Annotated[
        bool,
        typer.Option(
            "--four-over-six",
            help="Scale a block's maximum to 4 instead of 6 if the error is smaller.",
        ),
    ] = False,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Modules to leave in BF16, such as '*.layers.0.*'; repeatable."),
    ] = None,
    keep_sensitive: Annotated[
        float,
        typer.Option(
            metavar="PERCENT",
            help=(
                "Growth of the checkpoint in percent, for the layers that lose most when quantized;"
                " they stay in BF16."
            ),
        ),
    ] = 0.0,
    kv_cache: Annotated[
        str | None,
        typer.Option(
            "--kv-cache",
            help="Type of the KV cache to declare, with measured scales: fp8. Default: none.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write an NVFP4 checkpoint in another layout, or a BF16 model or a GGUF file in NVFP4."""
    from nibble.checkpoint.convert import convert as run
    from nibble.checkpoint.convert.wishes import read_wishes
    from nibble.cli.common import say
    from nibble.cli.pull_progress import shown

    wishes = read_wishes(
        activations, calibrate, four_over_six, exclude or (), method, kv_cache, keep_sensitive
    )
    with shown(say) as on_progress:
        done = run(source, dest, to, wishes, on_progress)
    if as_json:
        print_json(vars(done))
        return
    print(f"{done.dest}: {done.weights} NVFP4 weights, {done.nbytes} bytes")
    if done.kept:
        print(f"left in BF16 (--keep-sensitive): {', '.join(done.kept)}")


@app.command()
def reference(
    model: Annotated[str, typer.Argument(help="A folder, a Hugging Face id or a demo.")],
    device: Annotated[str, typer.Option(help="Device that computes: cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="Type that it computes in: float32 or float64.")
    ] = "float32",
    activations: Annotated[
        str | None,
        typer.Option(
            help=(
                "Inputs of NVFP4 layers: fp4 or bf16. Default: those with which this machine serves"
                " the model."
            )
        ),
    ] = None,
    answer_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            max=256,
            help="Tokens of each answer; each token reads weights again that do not fit in memory.",
        ),
    ] = 16,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write. Default: a file in nibble's cache, where `serve` finds it."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute a model's layers and answers from its checkpoint, for the canary of later starts."""
    from nibble.cli.reference import make

    found = make(model, dict(os.environ), device, dtype, activations, answer_tokens, out)
    if as_json:
        print_json(found)
    else:
        print(found["out"])


@app.command(context_settings=FREE_WORDS)
def pull(words: Words = None) -> None:
    """Download a model completely and verify it; --dry-run: only say what would come, from where
    and whether it fits.
    """
    from nibble.cli.pull import pull_model as run

    result, as_json = run(wanted(words, "pull"), dict(os.environ))
    if as_json:
        print_json(result)
    elif "path" in result:
        print(result["path"])


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


@app.command()
def status(as_json: Json = False) -> None:
    """Show what the server on this machine does, its kernels and its canary's findings."""
    from nibble.cli.status import read_status, status_lines

    found = read_status(dict(os.environ))
    if as_json:
        print_json(found)
    else:
        print("\n".join(status_lines(found)))


@app.command()
def chat(question: str, model: str = "default", max_tokens: int = 256) -> None:
    """Ask the running server a question."""
    from nibble.cli.chat import ask

    ask(question, model, max_tokens, dict(os.environ))


@app.command()
def bench(
    url: Annotated[
        str | None,
        typer.Argument(help="Address of a server; default: this machine's, at HOST and PORT."),
    ] = None,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(help="Prompt lengths, such as 128,1024. Default: those two, if they fit."),
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option(help="Output lengths, such as 128. Default: 128.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Requests at the same time. Default: 1,4,16.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="Rounds of the whole sweep after a warm-up.")
    ] = 3,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="Requests of each cell and round. Default: 4 for each at a time, at least 8.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Served model. Default: the server's first.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder of the model's tokenizer. Default: the server's model folder."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Other server to measure in turns: stock (`vllm serve` with the same checkpoint)."
        ),
    ] = None,
    stock_flags: Annotated[
        str, typer.Option(help="Flags of `vllm serve` for --against stock, as one word.")
    ] = "",
    compare: Annotated[
        Path | None,
        typer.Option(help="Earlier results.json; exits with 6 if this run is slower beyond noise."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results.json, README.md and a plot as SVG and PNG."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a running server with `vllm bench serve`: tokens/s, time to first token and between
    tokens.
    """
    from nibble.cli.bench import Wishes
    from nibble.cli.bench import bench as run

    wishes = Wishes(
        url, model, prompt_tokens, output_tokens, concurrency, rounds, requests, tokenizer,
        against, stock_flags, compare, out,
    )  # fmt: skip
    raise typer.Exit(run(wishes, dict(os.environ), as_json))


@app.command()
def soak(
    url: Annotated[
        str | None,
        typer.Argument(help="Address of a server; default: this machine's, at HOST and PORT."),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.1, max=100_000, help="Length of the load in minutes.")
    ] = 10.0,
    concurrency: Annotated[
        int, typer.Option(min=1, max=10_000, help="Clients, each with one request at a time.")
    ] = 8,
    model: Annotated[
        str | None, typer.Option(help="Served model. Default: the server's first.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="New file for everything that was seen, as JSON.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Load a running server with mixed requests for minutes or hours and judge memory, restarts,
    errors and drift; exits with 6 where it was not steady.
    """
    from nibble.cli.soak import soak as run

    raise typer.Exit(run(url, minutes, concurrency, model, out, dict(os.environ), as_json))


@app.command()
def bundle(
    model: Annotated[str, typer.Argument(help="A folder, ORG/NAME, or a model of the image.")],
    folder: Annotated[Path, typer.Argument(help="New folder for the bundle.")],
    image: Annotated[str, typer.Option(help="Image of the local engine.")] = "nibble:cpu",
    as_json: Json = False,
) -> None:
    """Write an image, a model, their licences and checksums into a folder that serves without a
    network.
    """
    from nibble.cli.bundle import bundle as run

    run(model, folder, image, dict(os.environ), as_json)


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
