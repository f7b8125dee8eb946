"""`nibble recipes verify`: measures and evaluates a running server, and writes the evidence of its
recipe.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from nibble.cli.common import Json, print_json, say
from nibble.errors import ExitCode, NibbleError
from nibble.machine.out_path import create_folder

FORMAT, EVIDENCE = "nibble evidence 1", "evidence.json"


def verify(
    model: Annotated[str, typer.Argument(help="Id of the recipe.")],
    url: Annotated[
        str | None,
        typer.Argument(help="Address of a server; default: this machine's, at HOST and PORT."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="New folder for the evidence. Default: NAME-TARGET-evidence."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Reference for parity: a server's address or a file of --record."),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="Data set with a score: words, choice, or a file of JSON lines."),
    ] = None,
    harness: Annotated[
        str, typer.Option(help="Python with lm-evaluation-harness. Default: this one.")
    ] = sys.executable,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Questions of each data set. Default: all.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Requests at the same time. Default: 1,8.")
    ] = "1,8",
    prompt_tokens: Annotated[
        str | None, typer.Option(help="Prompt lengths. Default: 128,1024.")
    ] = None,
    output_tokens: Annotated[str | None, typer.Option(help="Output lengths. Default: 128.")] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="Rounds of the whole sweep after a warm-up.")
    ] = 3,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Report of `nibble selftest --out FILE` on this machine: evidence from it"
            " and the running server, without measuring; --out then names a file."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure and judge the running server as a recipe's evidence. Exits with 6 where quality
    misses the recipe's thresholds.
    """
    from nibble.cli import bench, evaluate
    from nibble.machine.paths import root

    environ = dict(os.environ)
    if report is not None:
        from nibble.cli.report_evidence import show_report_evidence

        return show_report_evidence(model, report, out, environ, as_json)
    plan = _plan(model, url, environ)
    target = str(plan.get("target", "unknown"))
    folder = out or Path(f"{model.rpartition('/')[2]}-{target}-evidence")
    create_folder(folder, "evidence")
    quality = evaluate.Wishes(
        url, None, None, against, None, True, _parser(plan), tuple(task or ()), limit, harness,
    )  # fmt: skip
    found = evaluate.run(quality, environ)
    speed = bench.Wishes(
        url, prompts=prompt_tokens, outputs=output_tokens, concurrency=concurrency, rounds=rounds,
        out=folder / "bench",
    )  # fmt: skip
    code = bench.bench(speed, environ, as_json=False)
    if code:
        raise typer.Exit(code)
    evidence = gather(model, plan, found, json.loads((folder / "bench/results.json").read_text()))
    (folder / EVIDENCE).write_text(json.dumps(evidence, indent=1) + "\n")
    if as_json:
        print_json(evidence)
    else:
        evaluate.show(found)
        for line in recipe_lines(evidence, folder / EVIDENCE, root()):
            print(line)
    raise typer.Exit(ExitCode.VERIFY if found["failures"] else ExitCode.OK)


def gather(
    model: str, plan: Mapping[str, Any], quality: Mapping[str, Any], speed: Mapping[str, Any]
) -> dict[str, Any]:
    """The evidence: what ran, on what, how fast, how well. Pure."""
    return {
        "format": FORMAT,
        "recipe": model,
        "target": plan.get("target"),
        "verdict": "failed" if quality["failures"] else "passed",
        "date": quality["date"],
        "machine": speed["machine"],
        "software": speed["software"],
        "command": plan.get("command"),
        "speed": speed["cells"],
        "quality": {
            name: quality[name] for name in ("thresholds", "parity", "parts", "scores", "failures")
        },
    }


def recipe_lines(evidence: Mapping[str, Any], file: Path, root: Path) -> list[str]:
    """What to put into the recipe where the evidence passed. Pure."""
    if evidence["verdict"] != "passed":
        return [f"evidence in {file}; the recipe stays as it is"]
    name = re.sub(r"[^A-Za-z0-9.]+", "_", evidence["recipe"])
    kept = f"benchmarks/results/recipes/{name}-{evidence['target']}.json"
    best = max(evidence["speed"], key=lambda cell: cell["median"]["tokens_per_s"])
    one = min(evidence["speed"], key=lambda cell: cell["concurrency"])
    summary = (
        f"{one['median']['tokens_per_s']:.1f} tokens/s with {one['concurrency']} stream(s),"
        f" {best['median']['tokens_per_s']:.1f} with {best['concurrency']}; tools"
        f" {evidence['quality']['parts']['tools']['share']:.2f}"
    )
    return [
        f"evidence in {file}. To mark the recipe as verified, copy it to {root / kept} and write:",
        f"[target.{evidence['target']}]",
        'status = "verified"',
        f'evidence = "{kept}: {summary}"',
    ]


def _plan(model: str, url: str | None, environ: Mapping[str, str]) -> Mapping[str, Any]:
    """The plan of nibble's server. Raises MODEL without the recipe, CONFIG where the server has
    another one.
    """
    from nibble.bench.served import find_served
    from nibble.cli.status import status_at
    from nibble.machine.paths import root
    from nibble.recipes.recipe import load_recipe
    from nibble.serve.endpoint import endpoint_at, local_endpoint

    if load_recipe(model, root()) is None:
        raise NibbleError(
            ExitCode.MODEL,
            what=f"there is no recipe for {model}",
            expected="an id that `nibble recipes list` shows",
            action="correct the id",
        )
    endpoint = endpoint_at(url, environ) if url else local_endpoint(environ)
    find_served(endpoint, environ, "recipes verify")
    plan = status_at(endpoint, environ).get("plan") or {}
    served = (plan.get("recipe") or {}).get("id")
    if served != model:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"the server at {endpoint.address} runs with the recipe {served or 'of no model'}",
            expected=f"nibble's server of this machine with the recipe {model}",
            action="start it with `nibble serve`, and set NIBBLE_CONTROL_PORT to its control port",
        )
    say(f"recipe {model} on {plan.get('target')}")
    return plan


def _parser(plan: Mapping[str, Any]) -> str | None:
    from nibble.bench.quality.scripts import FORMS

    name = plan.get("args", {}).get("--tool-call-parser", {}).get("value")
    return str(name) if name in FORMS else None
