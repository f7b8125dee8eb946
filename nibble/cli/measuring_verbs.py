"""`nibble bench` and `nibble soak` as people type them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from nibble.cli.common import Json


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
            help="Other server to measure in turns, with the same model: stock (`vllm serve`),"
            " sglang or llama.cpp."
        ),
    ] = None,
    stock_flags: Annotated[
        str, typer.Option(help="Flags of `vllm serve` for --against stock, as one word.")
    ] = "",
    peer_flags: Annotated[
        str, typer.Option(help="Flags of the server that --against names, as one word.")
    ] = "",
    peer_program: Annotated[
        str | None,
        typer.Option(help="Python that has SGLang, or llama-server. Default: this one, PATH."),
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(help="The model's weights for --against llama.cpp.")
    ] = None,
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
    """Measure a running server's tokens/s and latencies. It runs `vllm bench serve`."""
    from nibble.cli.bench import Wishes
    from nibble.cli.bench import bench as run

    wishes = Wishes(
        url, model, prompt_tokens, output_tokens, concurrency, rounds, requests, tokenizer,
        against, stock_flags, peer_flags, peer_program, gguf, compare, out,
    )  # fmt: skip
    raise typer.Exit(run(wishes, dict(os.environ), as_json))


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
    """Load a running server and check that it stays steady. It judges memory, restarts, errors and
    drift under mixed requests, and exits with 6 where one of them is wrong.
    """
    from nibble.cli.soak import soak as run

    raise typer.Exit(run(url, minutes, concurrency, model, out, dict(os.environ), as_json))
