"""`nibble inspect`, `convert`, `reference` and `pull` as people type them."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Annotated

import typer

from nibble.cli.common import Json, Words, print_json, say, wanted


def inspect(words: Words = None) -> None:
    """Show what a checkpoint holds and whether it loads exactly."""
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
    """Convert to NVFP4 from BF16 or GGUF, or between layouts."""
    from nibble.checkpoint.convert import convert as run
    from nibble.checkpoint.convert.wishes import read_wishes
    from nibble.cli.pull_progress import shown

    wishes = read_wishes(
        activations, calibrate, four_over_six, exclude or (), method, kv_cache, keep_sensitive
    )
    gc.disable()  # a GGUF file's vocabulary is a million objects that stay
    with shown(say) as on_progress:
        done = run(source, dest, to, wishes, on_progress)
    if as_json:
        print_json(vars(done))
        return
    print(f"{done.dest}: {done.weights} NVFP4 weights, {done.nbytes} bytes")
    print(done.rate)
    if done.kept:
        print(f"left in BF16 (--keep-sensitive): {', '.join(done.kept)}")


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
    """Compute a model's layers and answers for the canary. Later starts compare with them."""
    from nibble.cli.reference import make

    found = make(model, dict(os.environ), device, dtype, activations, answer_tokens, out)
    if as_json:
        print_json(found)
    else:
        print(found["out"])


def pull(words: Words = None) -> None:
    """Download a model completely and verify it."""
    from nibble.cli.pull import pull_model as run

    result, as_json = run(wanted(words, "pull"), dict(os.environ))
    if as_json:
        print_json(result)
    elif "path" in result:
        print(result["path"])
