"""`nibble eval`: parity with a reference, tool calls and structured answers, tasks with a score."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from nibble.cli.common import INTERRUPTED, Json, print_json, say
from nibble.errors import ExitCode, NibbleError
from nibble.machine.out_path import create

FORMAT, VERB = "nibble eval 1", "eval"
MOST_TEXT = 1 << 20


@dataclass(frozen=True)
class Wishes:
    """What the user typed. Nothing of a part: the part is left out."""

    url: str | None = None
    model: str | None = None
    record: Path | None = None
    against: str | None = None
    text: Path | None = None
    tools: bool = False
    parsers: str | None = None
    tasks: tuple[str, ...] = ()
    limit: int | None = None
    harness: str = sys.executable
    tokenizer: str | None = None
    limits: Mapping[str, float | None] = field(default_factory=dict)
    out: Path | None = None

    @property
    def asks_server(self) -> bool:
        """Whether a part needs a running server: all but scripted answers do."""
        named = self.record or self.against or self.tools or self.tasks
        return bool(named) or self.parsers is None


def evaluate(
    url: Annotated[
        str | None,
        typer.Argument(help="Address of a server; default: this machine's, at HOST and PORT."),
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="New file for the server's log-probs, as a reference.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Reference for parity: a server's address or a file of --record."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text for log-probs. Default: a page that nibble ships.")
    ] = None,
    tools: Annotated[
        bool, typer.Option("--tools", help="Tool calls and structured answers; the default part.")
    ] = False,
    parsers: Annotated[
        str | None,
        typer.Option(help="vLLM's tool parsers to test without a server: names, or recipes."),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="Data set with a score: words, choice, or a file of JSON lines."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Questions of each data set. Default: all.")
    ] = None,
    harness: Annotated[
        str, typer.Option(help="Python with lm-evaluation-harness. Default: this one.")
    ] = sys.executable,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder of the model's tokenizer. Default: the server's model folder."),
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(min=0, help="Largest mean KL in nats. Default: recipe, 0.05.")
    ] = None,
    min_top1: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Smallest share of equal favourites. Default: 0.95."),
    ] = None,
    min_tools: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Smallest share of passed cases. Default: recipe, 1."),
    ] = None,
    min_score: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Smallest score of each task. Default: recipe, 0."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Served model. Default: the server's first.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New file for everything, as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Judge a running server's answers. Parity with a reference, tool calls, structured answers and
    tasks with a score; exits with 6 where one misses its threshold.
    """
    limits = {"max_kl": max_kl, "min_top1": min_top1,
              "min_tools": min_tools, "min_score": min_score}  # fmt: skip
    wishes = Wishes(
        url, model, record, against, text, tools, parsers, tuple(task or ()), limit, harness,
        tokenizer, limits, out,
    )  # fmt: skip
    try:
        found = run(wishes, dict(os.environ))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    print_json(found) if as_json else show(found)
    raise typer.Exit(ExitCode.VERIFY if found["failures"] else ExitCode.OK)


def run(wishes: Wishes, environ: Mapping[str, str]) -> dict[str, Any]:
    """Evaluate; the result as JSON has it, also written to `out`. Raises NibbleError."""
    from nibble.bench.about import about_software
    from nibble.bench.quality.parity import TEXT
    from nibble.bench.quality.tasks import read_task
    from nibble.bench.quality.thresholds import choose

    text = _read_text(wishes.text or TEXT)
    tasks = [read_task(name) for name in wishes.tasks]
    reference = _reference(wishes)
    found: dict[str, Any] = {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["nibble", *sys.argv[1:]]),
        "software": about_software(),
    }
    outcomes: dict[str, Any] = {}
    if wishes.parsers is not None:
        outcomes["parsers"] = _parsers(wishes.parsers, environ)
    if not wishes.asks_server:
        return _finish(found, wishes, choose(wishes.limits, {}), None, outcomes, [])
    endpoint, served, recipe = _server(wishes, environ)
    found |= {"model": served.to_json(), "recipe": recipe.get("id")}
    limits = choose(wishes.limits, recipe.get("quality", {}))
    _refuse_existing(wishes)
    try:
        parity = _parity(wishes, endpoint, served, text, reference, environ)
        only = wishes.tasks or wishes.record or wishes.against or wishes.parsers is not None
        if wishes.tools or not only:
            outcomes["tools"] = _tools(endpoint, served)
        scores = _tasks(wishes, tasks, endpoint, served, environ)
    except OSError as error:
        raise endpoint.no_answer(error, environ, VERB) from None
    return _finish(found, wishes, limits, parity, outcomes, scores)


def _finish(
    found: dict[str, Any],
    wishes: Wishes,
    limits: Any,
    parity: Any,
    outcomes: Mapping[str, Any],
    scores: Any,
) -> dict[str, Any]:
    from nibble.bench.quality.thresholds import failures, share

    found |= {
        "thresholds": asdict(limits),
        "parity": parity and parity.to_json(),
        "parts": {
            part: {"share": share(cases), "cases": [asdict(one) for one in cases]}
            for part, cases in outcomes.items()
        },
        "scores": [one.to_json() for one in scores],
        "failures": failures(limits, parity, outcomes, scores),
    }
    if wishes.out is not None:
        _write(wishes.out, json.dumps(found, indent=1) + "\n")
    return found


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_TEXT:
            raise ValueError("it is larger than 1 MiB")
        text = path.read_text()
        if not text.strip():
            raise ValueError("it is empty")
        return text
    except (OSError, ValueError) as error:
        raise NibbleError(
            ExitCode.USAGE,
            what=f"{path} is not a text ({getattr(error, 'strerror', None) or error})",
            expected="UTF-8 of up to 1 MiB",
            action="correct --text",
        ) from None


def _reference(wishes: Wishes) -> Any:
    """A recording that `--against` names, or None for an address or nothing."""
    from nibble.bench.quality.parity import read_scored

    name = wishes.against
    if name is None or "://" in name or (":" in name and not Path(name).exists()):
        return None
    return read_scored(Path(name))


def _server(wishes: Wishes, environ: Mapping[str, str]) -> tuple[Any, Any, dict[str, Any]]:
    """(endpoint, model, its recipe's id and thresholds)."""
    from nibble.bench.served import find_served
    from nibble.cli.status import status_at
    from nibble.machine.paths import root
    from nibble.recipes.recipe import load_recipe
    from nibble.serve.endpoint import endpoint_at, local_endpoint

    endpoint = endpoint_at(wishes.url, environ) if wishes.url else local_endpoint(environ)
    served = find_served(endpoint, environ, VERB, wishes.model)
    plan = status_at(endpoint, environ).get("plan") or {}
    name = (plan.get("recipe") or {}).get("id") or served.id
    recipe = load_recipe(str(name), root())
    return endpoint, served, {"id": recipe.id, "quality": recipe.quality} if recipe else {}


def _refuse_existing(wishes: Wishes) -> None:
    for path, option in ((wishes.record, "--record"), (wishes.out, "--out")):
        if path is not None:
            create(path, option)
            path.unlink()


def _write(path: Path, text: str) -> None:
    create(path)
    path.write_text(text)


def _parsers(names: str, environ: Mapping[str, str]) -> list[Any]:
    """Scripted answers of the parsers named, or of all that recipes name."""
    from nibble.bench.quality.outcome import Outcome
    from nibble.bench.quality.parsers import named_in_recipes, run_scripts
    from nibble.bench.quality.scripts import WITHOUT_SCRIPTS
    from nibble.machine.paths import root
    from nibble.recipes.recipe import list_recipes, load_recipe

    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if chosen == ["recipes"]:
        loaded = (load_recipe(name, root()) for name in list_recipes(root()))
        tables = [
            table
            for recipe in loaded
            if recipe is not None
            for table in (recipe.args, *(one.args for one in recipe.targets.values()))
        ]
        chosen = named_in_recipes(tables)
    say(f"{len(chosen)} tool parsers of vLLM")
    skipped = [
        Outcome(name, True, WITHOUT_SCRIPTS[name], is_skipped=True)
        for name in chosen
        if name in WITHOUT_SCRIPTS
    ]
    return run_scripts([one for one in chosen if one not in WITHOUT_SCRIPTS], environ) + skipped


def _parity(
    wishes: Wishes,
    endpoint: Any,
    served: Any,
    text: str,
    reference: Any,
    environ: Mapping[str, str],
) -> Any:
    from nibble.bench.quality.parity import compare, fit, score, write_scored
    from nibble.bench.served import find_served
    from nibble.serve.endpoint import endpoint_at

    if not (wishes.record or wishes.against):
        return None
    say("log-probs of the text")
    ours = score(endpoint, served, reference.ids) if reference else fit(endpoint, served, text)
    if wishes.record is not None:
        write_scored(ours, wishes.record)
        say(f"{len(ours.ids)} tokens in {wishes.record}")
    if wishes.against is None:
        return None
    if reference is None:
        other = endpoint_at(wishes.against, environ)
        try:
            theirs = score(other, find_served(other, environ, VERB), ours.ids)
        except OSError as error:
            raise other.no_answer(error, environ, VERB) from None
    else:
        theirs = reference
    return compare(ours, theirs)


def _tools(endpoint: Any, served: Any) -> list[Any]:
    from nibble.bench.quality.outcome import Outcome
    from nibble.bench.quality.tools import cases, has_tools, run_cases

    takes_tools = has_tools(endpoint, served)
    todo = cases(takes_tools)
    say(f"{2 * len(todo)} requests for tools and structured answers")
    found = run_cases(endpoint, served, todo, lambda name: None)
    if not takes_tools:
        why = "the server takes no tools (--enable-auto-tool-choice)"
        found.append(Outcome("tools", True, why, is_skipped=True))
    return found


def _tasks(
    wishes: Wishes, tasks: list[Any], endpoint: Any, served: Any, environ: Mapping[str, str]
) -> Any:
    from nibble.bench.quality.tasks import run_tasks

    if not tasks:
        return []
    say(f"lm-evaluation-harness: {', '.join(wishes.tasks)}")
    return run_tasks(
        tasks, endpoint, served, wishes.tokenizer, wishes.harness, wishes.limit, environ
    )


def show(found: Mapping[str, Any]) -> None:
    """Print for a terminal."""
    if parity := found["parity"]:
        print(
            f"parity   KL {parity['kl_nats']:.5f} nats (largest {parity['kl_max_nats']:.4f}),"
            f" top-1 {parity['top1']:.4f}, perplexity {parity['perplexity']:.3f}"
            f" vs {parity['reference_perplexity']:.3f}, {parity['tokens']:.0f} tokens"
        )
    for part, one in found["parts"].items():
        ran = [case for case in one["cases"] if not case["is_skipped"]]
        print(f"{part:<8} {sum(case['passed'] for case in ran)} of {len(ran)} cases passed")
        for case in one["cases"]:
            if not case["passed"] or case["is_skipped"]:
                word = "not run" if case["is_skipped"] else "failed"
                print(f"         {word}: {case['name']}: {case['reason']}")
    for score in found["scores"]:
        print(
            f"score    {score['task']} {score['accuracy']:.3f} ± {score['error']:.3f}"
            f" ({score['questions']} questions)"
        )
    for line in found["failures"]:
        print(f"failed   {line}")
    print(f"verdict  {'failed' if found['failures'] else 'passed'}")
