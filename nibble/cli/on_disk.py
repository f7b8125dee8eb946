"""Puts the files that a plan needs on this disk, and plans again with their folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nibble.checkpoint import Checkpoint, read_checkpoint
from nibble.checkpoint.from_package import make as make_packaged
from nibble.cli.common import say, say_new
from nibble.cli.early_phase import early_phase
from nibble.hub.packaged import PACKAGED
from nibble.hub.progress import OnProgress, as_lines
from nibble.hub.pull import pull
from nibble.plan.environment import on_hub
from nibble.plan.files import Fetch, fetch_files
from nibble.plan.gather import Asked, hub_environ, plan_for
from nibble.plan.plan import Plan
from nibble.serve.preflight.machine import run_checks


def on_disk(plan: Plan, asked: Asked, said: set[str]) -> Plan:
    """The plan with model, draft and tokenizer as folders on disk. A start that the first plan
    refuses downloads nothing.
    """
    if plan.topology.is_headless and plan.settings.cluster_model == "head":
        return _from_head(plan, asked)
    if _is_local(plan) and not on_hub(plan.args):
        return fetched(plan, asked, as_lines(say))
    # A port in use or a GPU that is not here costs no download either
    warnings = run_checks(plan, asked.accepted.environ)
    say_new([f"warning: {warning}" for warning in warnings], said)
    with early_phase(asked) as on_progress:
        return fetched(plan, asked, on_progress)


def fetched(plan: Plan, asked: Asked, on_progress: OnProgress) -> Plan:
    """The plan with its files on disk, for verbs that open no port."""
    environ = hub_environ(asked)
    fetch = _fetch(environ, on_progress)
    package = PACKAGED.get(str(plan.settings.model))
    if package is not None and plan.checkpoint is None:
        make_packaged(package, asked.cache, environ, on_progress, say)
        plan = plan_for(asked)
    if _is_local(plan):
        local = fetch_files(plan, None, fetch)
        return plan_for(asked, local=local) if local else plan
    load_format = str(plan.args["--load-format"].value) if "--load-format" in plan.args else "auto"
    folder = fetch(str(plan.settings.model), plan.revision, load_format)

    def found(model: str, revision: str | None) -> tuple[Checkpoint | None, str]:
        return read_checkpoint(model, revision, path=folder, environ=environ), ""

    return plan_for(asked, found, fetch_files(plan, folder, fetch))


def _is_local(plan: Plan) -> bool:
    return plan.checkpoint is not None and plan.checkpoint.is_local


def _from_head(plan: Plan, asked: Asked) -> Plan:
    """The plan with the files that rank 0 sends to this rank."""
    from nibble.cluster.file_server import fetch_from_head

    environ = hub_environ(asked)
    with early_phase(asked):
        folder = fetch_from_head(plan.settings, environ, str(plan.topology.head), say)

    def found(model: str, revision: str | None) -> tuple[Checkpoint | None, str]:
        return read_checkpoint(model, revision, path=folder, environ=environ), ""

    return plan_for(asked, found, fetch_files(plan, folder, _fetch(environ, as_lines(say))))


def _fetch(environ: Mapping[str, str], on_progress: OnProgress) -> Fetch:
    def fetch(model: str, revision: str | None, load_format: str = "auto") -> Path:
        result = pull(model, revision, environ, on_progress, load_format)
        for notice in result.notices:
            say(notice)
        return result.path

    return fetch
