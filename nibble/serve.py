"""`nibble serve` and `nibble pull`: wishes -> model on disk -> plan -> checks -> vLLM."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nibble.api_key import resolve_api_key
from nibble.checkpoint import Checkpoint, read_checkpoint
from nibble.checks import run_checks
from nibble.errors import ExitCode, NibbleError
from nibble.launch import serve as launch
from nibble.localize import localize
from nibble.paths import cache_dir, root
from nibble.plan import Plan
from nibble.prepare import Asked, local_model, plan_for, read_wishes
from nibble.recipes import load_recipe
from nibble.settings import Settings


def serve(words: Sequence[str], environ: dict[str, str]) -> int:
    """Serve until told to stop; the exit code of the whole."""
    asked = read_wishes(words, environ)
    accepted = dict(asked.accepted.environ)
    plan = _pulled_plan(asked, accepted)
    for notice in plan.notices:
        say(notice)
    for warning in run_checks(plan, accepted):
        say(f"warning: {warning}")
    settings = plan.settings
    given = settings.api_key.get_secret_value() if settings.api_key else None
    key = resolve_api_key(settings.host, given, settings.allow_anonymous, settings.cache_dir or cache_dir(accepted))
    _announce(plan)
    return launch(plan, accepted, key)


def pull(words: Sequence[str], environ: dict[str, str]) -> tuple[dict[str, Any], bool]:
    """Fetch a model; (what was done, whether JSON was asked for)."""
    from nibble.pull import as_lines
    from nibble.pull import pull as fetch

    asked = read_wishes(words, environ, ("--json",))
    settings = asked.settings
    if settings.model is None:
        raise NibbleError(ExitCode.USAGE, "no model is given", "MODEL or an argument", "write `nibble pull ORG/NAME`")
    as_json = "--json" in asked.command.rest
    environ = _with_token(settings, asked.accepted.environ)
    result = fetch(settings.model, _revision(settings), environ, as_lines(say))
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(result).items()}, as_json


def _pulled_plan(asked: Asked, environ: Mapping[str, str]) -> Plan:
    """The plan with everything it needs on this disk; the Hub is asked before vLLM is started, not by it."""
    from nibble.pull import as_lines, pull

    credentials = _with_token(asked.settings, environ)
    folder: Path | None = None

    def fetch(model: str, revision: str | None, load_format: str = "auto") -> Path:
        result = pull(model, revision, credentials, as_lines(say), load_format)
        for notice in result.notices:
            say(notice)
        return result.path

    def find(model: str, revision: str | None) -> tuple[Checkpoint | None, str]:
        nonlocal folder
        # Head files and this machine first: what cannot be served must not cost a download.
        planned = plan_for(asked)
        run_checks(planned, environ)
        load_format = planned.args.get("--load-format")
        folder = fetch(model, revision, str(load_format.value) if load_format else "auto")
        return read_checkpoint(model, revision, path=folder), ""

    is_on_hub = asked.settings.model is not None and local_model(asked.settings.model) is None
    plan = plan_for(asked, find if is_on_hub else None)
    return localize(plan, folder, fetch)


def _revision(settings: Settings) -> str | None:
    recipe = load_recipe(settings.model, root()) if settings.recipe == "auto" and settings.model else None
    return settings.revision or (recipe.revision if recipe else "") or None


def _with_token(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with HF_TOKEN resolved from HF_TOKEN_FILE."""
    token = {"HF_TOKEN": settings.hf_token.get_secret_value()} if settings.hf_token else {}
    return {name: value for name, value in environ.items() if name != "HF_TOKEN_FILE"} | token


def _announce(plan: Plan) -> None:
    chosen = plan.choices["target"]
    recipe = f"recipe {plan.recipe.id} ({plan.recipe.status})" if plan.recipe else "no recipe"
    say(f"serving {plan.served_names[0]} on {chosen.value} ({chosen.reason}), {recipe}; `nibble plan` shows every setting")


def say(text: str) -> None:
    """A line of nibble's own, on stderr."""
    print(f"[nibble] {text}", file=sys.stderr, flush=True)
